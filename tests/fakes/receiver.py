"""A receiver of events, over HTTP and HTTPS. A test can change the script of each path at any time."""

import datetime
import hashlib
import hmac
import ipaddress
import json
import ssl
from collections import Counter
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from standardwebhooks import Webhook

from tests.fakes.server import HANG, Exchange, FakeServer, Head, Raw, Script, Step, answer

HEADERS = {
    "x-service-event",
    "x-service-delivery",
    "x-service-timestamp",
    "x-service-signature",
    "webhook-id",
    "webhook-timestamp",
    "webhook-signature",
}
OK = answer(204)
HUGE = 100 * 2**20
HUGE_ANSWER: Script = [Head(200, {"Content-Length": str(HUGE)}), *[bytes(65536)] * (HUGE // 65536)]


def drip(data: bytes = b"HTTP/1.1 200 OK\r\n" * 9, pause: float = 1.0) -> Script:
    """Returns a script that sends a byte at a time: no step is late, but the whole is."""
    return [step for byte in data for step in (Raw(bytes([byte])), pause)]


class FakeReceiver(FakeServer):
    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        super().__init__(tls)
        self.default: Script = OK
        self._scripts: dict[str, Script] = {}
        self._at: dict[str, list[Exchange]] = {}

    def url(self, path: str = "/events", host: str = "127.0.0.1") -> str:
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}{path}"

    def plays(self, path: str, *steps: Step | Script) -> None:
        """Sets the script of a path. Without steps, it is the default again."""
        self._scripts[path] = [s for step in steps for s in (step if isinstance(step, list) else [step])]

    def hangs(self, path: str) -> None:
        self.plays(path, HANG)

    def script(self, exchange: Exchange) -> Script:
        self._at.setdefault(exchange.path, []).append(exchange)
        return self._scripts.get(exchange.path) or self.default

    def got(self, path: str = "/events") -> list[Exchange]:
        return self._at.get(path, [])

    def ids(self, path: str = "/events") -> Counter[str]:
        """Returns how often each event was received."""
        return Counter(exchange.header("x-service-delivery") or "" for exchange in self.got(path))


def verified(exchange: Exchange, secret: str) -> dict[str, Any]:
    """Checks a delivery against the interface, and returns its envelope."""
    assert exchange.method == "POST"
    assert exchange.header("content-type") == "application/json"
    headers = {name: exchange.header(name) for name in HEADERS}
    assert all(headers.values()), headers
    timestamp = headers["x-service-timestamp"]
    signature = hmac.new(secret.encode(), f"{timestamp}.".encode() + exchange.body, hashlib.sha256).hexdigest()
    assert headers["x-service-signature"] == f"sha256={signature}"
    Webhook(secret).verify(exchange.body, headers)
    envelope = json.loads(exchange.body)
    assert envelope.keys() == {"type", "id", "timestamp", "data"}
    assert envelope["type"] == headers["x-service-event"]
    assert envelope["id"] == headers["x-service-delivery"] == headers["webhook-id"]
    assert isinstance(envelope["timestamp"], int)
    assert str(envelope["timestamp"]) == timestamp
    assert str(envelope["timestamp"] // 1000) == headers["webhook-timestamp"]
    assert {"appId", "appName"} <= envelope["data"].keys()
    return envelope


def certificate(folder: Path, name: str, *, days: float = 1, address: str | None = None) -> tuple[ssl.SSLContext, str]:
    """Returns the TLS context of a server whose certificate expires in so many days, and the CA file for it."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    names: list[x509.GeneralName] = [x509.DNSName(name)]
    if address:
        names.append(x509.IPAddress(ipaddress.ip_address(address)))
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=9))
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    file = folder / f"{made.serial_number}.pem"
    file.write_bytes(private + made.public_bytes(serialization.Encoding.PEM))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(file)
    return context, str(file)
