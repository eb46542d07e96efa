"""A receiver for event webhooks. It needs only the standard library.

SERVICE_WEBHOOK_SECRET=whsec_… python receiver.py [port]
"""

import hashlib
import hmac
import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SECRET = os.environ["SERVICE_WEBHOOK_SECRET"].encode()
MAX_AGE = 5 * 60 * 1000  # ms
MAX_BYTES = 2**20


def genuine(headers, body: bytes) -> bool:
    timestamp = headers.get("X-Service-Timestamp", "")
    signature = headers.get("X-Service-Signature", "").encode("latin-1")
    if not (timestamp.isascii() and timestamp.isdigit() and len(timestamp) < 16):
        return False
    signed = timestamp.encode() + b"." + body  # the bytes as received; re-encoded JSON would differ
    expected = b"sha256=" + hmac.new(SECRET, signed, hashlib.sha256).hexdigest().encode()
    if len(signature) != len(expected) or not hmac.compare_digest(signature, expected):
        return False
    return abs(time.time() * 1000 - int(timestamp)) <= MAX_AGE


class Receiver(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 10

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit() and len(length) < 10 and int(length) <= MAX_BYTES):
            self.close_connection = True
            self.reply(413 if length.isdigit() else 411)
            return
        body = self.rfile.read(int(length))
        if not genuine(self.headers, body):
            self.reply(401)
            return
        self.reply(204)  # respond immediately: after 5 s, the delivery fails
        event = json.loads(body)
        # The same id can arrive twice. If an event must be processed only once, remember its id.
        print(event["id"], event["type"], event["data"], flush=True)

    def reply(self, status: int) -> None:
        self.send_response(status)
        if status != 204:
            self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1]) if len(sys.argv) > 1 else 3000), Receiver)
    print(f"listening on {server.server_port}", flush=True)
    server.serve_forever()
