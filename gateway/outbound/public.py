"""Decides which addresses belong to the public internet.

Sandboxes check their connections with this table, too. Every build and app loads this module, so it imports only
`ipaddress` and `socket`.
"""

import ipaddress
import socket

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

# The IANA special-purpose registries, and the internal addresses they omit. `ipaddress.is_global` is not used because
# it changes between patch releases (3.11.10 and 3.12.4, and again for 3fff::/20), and because it calls multicast
# addresses, and loopback behind NAT64, global.
NOT_PUBLIC = [
    ipaddress.ip_network(block)
    for block in (
        "0.0.0.0/8",  # "this network": Linux connects 0.0.0.0 to loopback
        "10.0.0.0/8",  # private
        "100.64.0.0/10",  # carrier-grade NAT: cluster networks, Alibaba's metadata service
        "127.0.0.0/8",  # loopback
        "168.63.129.16/32",  # public, but inside a virtual machine of Azure its host answers
        "169.254.0.0/16",  # link-local: the metadata services
        "172.16.0.0/12",  # private
        "192.0.0.0/24",  # protocol assignments, Oracle's metadata service; its anycasts serve no HTTP
        "192.0.2.0/24",  # documentation
        "192.88.99.0/24",  # 6to4 relays, withdrawn
        "192.168.0.0/16",  # private
        "198.18.0.0/15",  # benchmarking
        "198.51.100.0/24",  # documentation
        "203.0.113.0/24",  # documentation
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",  # reserved, and broadcast
        "2001::/23",  # protocol assignments: Teredo (carries an IPv4), benchmarking, ORCHID
        "2001:db8::/32",  # documentation
        "2002::/16",  # 6to4: carries an IPv4 that any relay connects to
        "3fff::/20",  # documentation
    )
]

# The only IPv6 block allocated for public use. It excludes unspecified, loopback, IPv4-compatible,
# 64:ff9b:1::/48 (local NAT64), 100::/64 (discard), 5f00::/16 (segment routing), fc00::/7 (unique local, metadata
# services), fe80::/10 (link-local), fec0::/10 (site-local) and ff00::/8 (multicast).
GLOBAL_V6 = ipaddress.IPv6Network("2000::/3")

# The resolver of an IPv6-only network answers with these for every name that has only IPv4.
NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


# The proxy of this machine is public anyway. A firewall may protect the other ports, but it does not see connections of
# the machine to itself.
OPEN_PORTS = {80, 443}


def is_own_service(address: str, port: int) -> bool:
    """Returns whether the address belongs to this machine and the port is not its proxy's. Sends nothing."""
    if port in OPEN_PORTS:
        return False
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, port))
        except OSError:  # there is no route to it
            return False
        return bool(probe.getsockname()[0] == address)


def is_public(address: Address) -> bool:
    if isinstance(address, ipaddress.IPv6Address):
        if address in NAT64:
            address = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        elif address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        elif address not in GLOBAL_V6 or address.scope_id is not None:
            return False
    return not any(address in network for network in NOT_PUBLIC)
