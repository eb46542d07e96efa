"""An app that sends endless empty WebSocket frames, or its visitors, which read them."""

import base64
import hashlib
import re
import selectors
import socket
import sys
import threading

GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # of RFC 6455
FRAMES = b"\x82\x00" * 100_000


def answer(connection: socket.socket) -> None:
    request = b""
    while b"\r\n\r\n" not in request:
        request += connection.recv(65_536)
    key = re.search(rb"(?i)sec-websocket-key: *(\S+)", request)
    assert key
    accept = base64.b64encode(hashlib.sha1(key[1] + GUID).digest())
    lines = [b"HTTP/1.1 101 Switching", b"Upgrade: websocket", b"Connection: Upgrade", b"Sec-WebSocket-Accept: "]
    connection.sendall(b"\r\n".join(lines) + accept + b"\r\n\r\n")
    try:
        while True:
            connection.sendall(FRAMES)
    except OSError:
        connection.close()


def app(path: str) -> None:
    server = socket.socket(socket.AF_UNIX)
    server.bind(path)
    server.listen()
    print("listening", flush=True)
    while True:
        threading.Thread(target=answer, args=(server.accept()[0],), daemon=True).start()


def visitors(port: str, host: str, count: str) -> None:
    """Prints the number of received bytes every tenth of a second."""
    selector, seen = selectors.DefaultSelector(), 0
    head = f"GET /socket HTTP/1.1\r\nHost: {host}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    head += f"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {base64.b64encode(bytes(16)).decode()}\r\n\r\n"
    for _ in range(int(count)):
        connection = socket.create_connection(("127.0.0.1", int(port)))
        connection.sendall(head.encode())
        selector.register(connection, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            seen += len(key.fileobj.recv(1_000_000))  # type: ignore[union-attr]
        print(seen, flush=True)


if __name__ == "__main__":
    {"app": app, "visitors": visitors}[sys.argv[1]](*sys.argv[2:])
