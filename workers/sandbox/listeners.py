"""Where programs listen, in the network namespace of this process."""

import contextlib
import socket
import sys
from collections.abc import Container

TABLES = {"/proc/net/tcp": socket.AF_INET, "/proc/net/tcp6": socket.AF_INET6}
LISTENS = "0A"  # the state of a socket in these tables
WORD_DIGITS = 8  # of an address, whose words of 32 bits are in the order of the machine
MOST = 8  # addresses


def find_listeners(ignored: Container[int]) -> list[str]:
    """Returns the addresses with a TCP port that is not ignored, such as 0.0.0.0:3000 and [::1]:3000."""
    found = []
    for table, family in TABLES.items():
        with contextlib.suppress(OSError), open(table) as lines:  # a system without such a list
            next(lines)
            for local, _, state in (line.split()[1:4] for line in lines):
                if state != LISTENS:  # those that listen come first
                    break
                digits, _, port = local.partition(":")
                if int(port, 16) not in ignored:
                    host = socket.inet_ntop(family, _decode(digits))
                    found.append(f"[{host}]:{int(port, 16)}" if ":" in host else f"{host}:{int(port, 16)}")
    return found[:MOST]


def _decode(digits: str) -> bytes:
    words = (digits[at : at + WORD_DIGITS] for at in range(0, len(digits), WORD_DIGITS))
    return b"".join(int(word, 16).to_bytes(4, sys.byteorder) for word in words)
