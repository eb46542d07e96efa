"""The callers: 250 accounts and 1,000 apps. Each app has one user and a backend with an ES256 key, served as JWKS.

The default rate limits apply. A user may send 20 requests in any minute, so all users together may send 20,000. `Pace`
delays a run until its requests fit into the minute.
"""

from __future__ import annotations

import asyncio
import json
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import jwt
from cryptography.hazmat.primitives.asymmetric import ec
from jwt.algorithms import ECAlgorithm

ACCOUNTS = 250
APPS = 1000
USER_LIMIT = 20  # requests per minute
AUDIENCE = "bench"


class Callers:
    def __init__(self, folder: Path, operator_token: str) -> None:
        self.apps = [f"bench-{n:04d}" for n in range(APPS)]
        self.api_keys: dict[str, list[str]] = {}  # of all accounts, by target
        self._operator = {"authorization": f"Bearer {operator_token}"}
        self._keys = {app: ec.generate_private_key(ec.SECP256R1()) for app in self.apps}
        self._strangers: Counter[str] = Counter()  # by target
        self._folder, self._written = folder, set[str]()

    def rotation_at(self, path: str) -> Path:
        """Returns the file of all callers, who ask at this path below the app's `/ai`."""
        rotation = self._folder / f"callers{path.replace('/', '-')}.txt"
        if path not in self._written:
            rotation.write_text("".join(self._line(app, "user", path) for app in self.apps))
            self._written.add(path)
        return rotation

    def fresh_rotation(self, target: str, count: int) -> Path:
        """Creates new users, whose tokens the target cannot have cached."""
        first = self._strangers[target]
        self._strangers[target] += count
        lines = (self._line(self.apps[n % APPS], f"stranger-{n}") for n in range(first, first + count))
        rotation = self._folder / f"strangers-{target}.txt"
        rotation.write_text("".join(lines))
        return rotation

    def _line(self, app: str, user: str, path: str = "") -> str:
        now = int(time.time())
        claims = {"sub": user, "iss": _origin(app), "aud": AUDIENCE, "iat": now, "exp": now + 86_400}
        token = jwt.encode(claims, self._keys[app], algorithm="ES256", headers={"kid": app})
        return f"/capsule/{app}/ai{path}\tAuthorization: Bearer {token}\tOrigin: {_origin(app)}\n"

    @contextmanager
    def backends(self) -> Iterator[str]:
        """Serves every app's keys under `<address>/<app>`."""
        documents = {f"/{app}": _jwks(app, key) for app, key in self._keys.items()}

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = 65_536

            def do_GET(self) -> None:
                body = documents.get(self.path, b"")
                self.send_response(200 if body else 404)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None: ...

        class Server(ThreadingHTTPServer):
            request_queue_size = 1024

        with Server(("127.0.0.1", 0), Handler) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            try:
                yield f"http://127.0.0.1:{server.server_address[1]}"
            finally:
                server.shutdown()

    def register(self, target: str, gateway: str, backends: str) -> None:
        self.api_keys[target] = asyncio.run(self._register(gateway, backends))

    async def _register(self, gateway: str, backends: str) -> list[str]:
        """Returns the accounts' keys."""
        async with _client(gateway) as client:

            async def account(n: int) -> tuple[str, str]:
                body = {"name": f"bench {n}", "plan": "max"}
                answer = await client.post("/platform/accounts", json=body, headers=self._operator)
                made = answer.raise_for_status().json()
                return made["id"], made["apiKey"]

            async def app(name: str, owner: str) -> None:
                keys = f"{backends}/{name}"
                auth = {"kind": "jwks", "url": keys, "issuer": _origin(name), "audience": AUDIENCE}
                body = {"account": owner, "auth": auth}
                answer = await client.put(f"/platform/apps/{name}", json=body, headers=self._operator)
                answer.raise_for_status()

            accounts = await asyncio.gather(*(account(n) for n in range(ACCOUNTS)))
            owners = [accounts[n % ACCOUNTS][0] for n in range(APPS)]
            await asyncio.gather(*(app(name, owner) for name, owner in zip(self.apps, owners, strict=True)))
            return [key for _, key in accounts]

    def spend(self, target: str, gateway: str) -> tuple[int, int] | None:
        """Returns the nano-euro settled and reserved today by all accounts; None if the gateway has no account API."""
        return asyncio.run(self._spend(self.api_keys[target], gateway))

    async def _spend(self, api_keys: list[str], gateway: str) -> tuple[int, int] | None:
        async with _client(gateway) as client:
            answers = await asyncio.gather(
                *(client.get("/account", headers={"authorization": f"Bearer {key}"}) for key in api_keys)
            )
        if answers[0].status_code == 404:
            return None
        spends = [answer.raise_for_status().json()["spend"] for answer in answers]
        return sum(spend["settled"] for spend in spends), sum(spend["reserved"] for spend in spends)


class Pace:
    """A limiter of the requests per user in any minute."""

    def __init__(self) -> None:
        self._sent: deque[tuple[float, int]] = deque()

    def wait_for(self, requests: int) -> None:
        wanted = _per_user(requests)
        while self._sent and sum(count for _, count in self._sent) + wanted > USER_LIMIT:
            at, _ = self._sent[0]
            time.sleep(max(0.0, at + 61 - time.monotonic()))
            self._sent.popleft()

    def record(self, requests: int) -> None:
        self._sent.append((time.monotonic(), _per_user(requests)))


def _per_user(requests: int) -> int:
    return math.ceil(requests / APPS)


def _client(gateway: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=16)
    return httpx.AsyncClient(base_url=gateway, timeout=httpx.Timeout(30, pool=None), limits=limits, trust_env=False)


def _origin(app: str) -> str:
    return f"https://{app}.apps.localhost"


def _jwks(app: str, key: ec.EllipticCurvePrivateKey) -> bytes:
    public = ECAlgorithm.to_jwk(key.public_key(), as_dict=True)
    return json.dumps({"keys": [{**public, "kid": app, "use": "sig", "alg": "ES256"}]}).encode()
