"""Where the hosts that serve apps reach each other. Caddy passes the requests for an app on to the host that runs it.

    hosts/<host id>/<host:port>      an empty file, named by where that host's Caddy is reached
    hosts/none/                      no host
    releases/<app id>/live/owner     link to one of these folders, if the app runs elsewhere

A request that a host has passed on has a header with a secret, which all hosts derive from GATEWAY_ENCRYPTION_KEY
(`caddy.py`). It is passed on only once. From other senders, Caddy drops the header.
"""

import re
import socket
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from gateway.settings import Settings
from workers.hosting import caddy
from workers.hosting.releases import Site

NO_HOST = "none"
HOST_ID = re.compile(r"[0-9a-f]+")
ADDRESS = re.compile(r"[A-Za-z0-9.-]+:\d{1,5}|\[[0-9a-fA-F:.]+\]:\d{1,5}")  # becomes the name of a file
EVERY_ADDRESS = ("0.0.0.0", "::", "")  # noqa: S104
REDIS_PORT = 6379  # any port would do: nothing is sent


class Neighbors:
    def __init__(self, folder: Path) -> None:
        self._hosts = folder / "hosts"
        self._written: dict[str, str] = {}  # the addresses in the folders, by host

    def pass_on(self, site: Site, host: str, address: str) -> None:
        """Passes the app's requests on to a host. Without its address, Caddy answers 503."""
        if not (ADDRESS.fullmatch(address) and HOST_ID.fullmatch(host)):
            host, address = NO_HOST, ""
        if self._written.get(host) != address:
            self._write_address(host, address)
        site.pass_on(f"../../../{self._hosts.name}/{host}")

    def _write_address(self, host: str, address: str) -> None:
        folder = self._hosts / host
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        for former in folder.iterdir():
            if former.name != address:
                former.unlink()
        if address:
            (folder / address).touch(mode=0o644)
        self._written[host] = address


def find_own_address(settings: Settings, folder: Path) -> str:
    """Returns host:port where other hosts reach this host's Caddy; empty until that is known."""
    if settings.host_address:
        return settings.host_address
    host, _, port = settings.apps_listen.rpartition(":")
    host = host.strip("[]")
    with suppress(ValueError):  # in development, Caddy may listen at another port
        port = str(urlsplit(caddy.read_address(folder)).port or port)
    if host in EVERY_ADDRESS:
        host = find_address_towards(settings.redis_url)
    return "" if not host else f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def find_address_towards(url: str) -> str:
    """Returns the address of this machine from which it reaches the first server in the URL; empty for none."""
    parts = urlsplit(url)
    first = urlsplit(f"//{parts.netloc.rpartition('@')[2].partition(',')[0]}")
    try:
        found = socket.getaddrinfo(first.hostname or "localhost", first.port or REDIS_PORT, type=socket.SOCK_DGRAM)
        family, kind, _, _, address = found[0]
        with socket.socket(family, kind) as route:  # of UDP: connecting sends nothing
            route.connect(address)
            return str(route.getsockname()[0])
    except (OSError, ValueError):
        return ""
