"""The demo app: the unchanged capsule template, and a backend that signs its users' tokens."""

from __future__ import annotations

import contextlib
import hashlib
import json
import mimetypes
import secrets
import time
from pathlib import Path
from typing import Any

import httpx
import jwt
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from jwt.algorithms import ECAlgorithm
from litestar import Litestar, Request, Response, get, post
from litestar.datastructures import Cookie
from litestar.exceptions import NotFoundException
from litestar.response import Redirect

TEMPLATE = Path(__file__).parents[2] / "capsule"
TOKEN_SECONDS = 600
SESSION_SECONDS = 30 * 86_400
NOT_STORED = {"Cache-Control": "no-cache"}


class Signer:
    """Signs users' tokens with ES256. The key id is the key's fingerprint, so a new key always has a new id."""

    def __init__(self, pem: str) -> None:
        self._key = load_pem_private_key(pem.encode(), None)
        public = json.loads(ECAlgorithm.to_jwk(self._key.public_key()))  # type: ignore[arg-type]
        self._kid = hashlib.sha256(json.dumps(public, sort_keys=True).encode()).hexdigest()[:16]
        self.jwks = {"keys": [{**public, "kid": self._kid, "use": "sig", "alg": "ES256"}]}

    def sign_token(self, user: str) -> str:
        now = int(time.time())
        claims = {"sub": user, "iat": now, "exp": now + TOKEN_SECONDS}
        return jwt.encode(claims, self._key, "ES256", {"kid": self._kid})  # type: ignore[arg-type]


def template_files(ai_url: str) -> dict[str, bytes]:
    """Returns the files of the built template, by path."""
    found = [TEMPLATE / "index.html", *(TEMPLATE / "demo").iterdir(), *(TEMPLATE / "lib").glob("*.js")]
    files = {str(path.relative_to(TEMPLATE)): path.read_bytes() for path in found}
    # Sets the variable that a Vite build sets, on the first line, so that line numbers do not change.
    env = json.dumps({"VITE_SERVICE_AI_URL": ai_url})
    return {**files, "lib/ai.js": f"import.meta.env = {env}; ".encode() + files["lib/ai.js"]}


def demo_app(signing_key: str, ai_url: str, address: str, hosted: str) -> Litestar:
    """Returns the demo app. It serves the pages of its live deploy at `hosted`, or those of the template until then."""
    signer, host = Signer(signing_key), address.partition("//")[2]
    http = httpx.AsyncClient(base_url=hosted, headers={"Host": host}, trust_env=False, timeout=5)

    @post("/session", status_code=200, sync_to_thread=False)
    def session(request: Request[Any, Any, Any]) -> Response[Any]:
        """Signs in as the user of the cookie, or as a new user. `Accept: text/plain` returns only the token."""
        cookie = request.cookies.get("session") or secrets.token_urlsafe(16)
        # The cookie is a credential, so the gateway gets a hash of it.
        token = signer.sign_token("user-" + hashlib.sha256(cookie.encode()).hexdigest()[:16])
        plain = request.headers.get("Accept") == "text/plain"
        return Response(
            token if plain else {"token": token},
            media_type="text/plain" if plain else "application/json",
            cookies=[Cookie("session", cookie, max_age=SESSION_SECONDS, httponly=True, samesite="lax")],
            headers={"Cache-Control": "no-store"},
        )

    @get("/.well-known/jwks.json", sync_to_thread=False)
    def keys() -> dict[str, Any]:
        return signer.jwks

    @get(["/", "/{path:path}"])
    async def page(request: Request[Any, Any, Any], path: str = "/") -> Response[Any]:
        # The gateway accepts requests only from the app's own origin, so the page would not work on `localhost`.
        if str(request.base_url).rstrip("/") != address:
            return Redirect(address)
        with contextlib.suppress(httpx.TransportError):
            answer = await http.get(request.url.path)
            if answer.is_success:
                return Response(answer.content, media_type=answer.headers["content-type"], headers=NOT_STORED)
        name = path.strip("/") or "index.html"
        content = template_files(ai_url).get(name)
        if content is None:
            raise NotFoundException
        return Response(content, media_type=mimetypes.guess_type(name)[0], headers=NOT_STORED)

    return Litestar([session, keys, page], openapi_config=None, logging_config=None)
