"""A small OpenID provider: its page lets you sign in as anybody, because only this machine reaches it."""

import base64
import hashlib
import html
import secrets
import time
from typing import Annotated, Any, NamedTuple
from urllib.parse import parse_qs, urlencode, urlsplit

import jwt
from cryptography.hazmat.primitives.asymmetric import ec
from jwt.algorithms import ECAlgorithm
from litestar import Request, Response, Router, get, post
from litestar.datastructures import State
from litestar.params import FromQuery, QueryParameter
from litestar.response import Redirect

from gateway.pages.error_pages import render_page
from gateway.validation import is_email

PATH = "/identity"
CLIENT_ID = "capsule-dev"
OWNER, OPERATOR = "demo@example.com", "operator@example.com"  # of the demo account, and of the service
CODES = 100  # that wait to be exchanged; the oldest is forgotten first
TOKEN_SECONDS = 60

FORM = """\
<form>
{fields}
<p><button name="login" value="{owner}">Sign in as {owner}</button></p>
<p><button name="login" value="{operator}">Sign in as {operator}</button></p>
</form>
<form>
{fields}
<p><label>Somebody else: <input name="login" type="email" required></label> <button>Sign in</button></p>
</form>"""


class _Grant(NamedTuple):
    email: str
    nonce: str
    challenge: str


def identity_router(issuer: str, redirect_uri: str, client_secret: str) -> Router:
    """Returns the routes of the provider at the address `issuer`, for one client."""
    key, kid = ec.generate_private_key(ec.SECP256R1()), secrets.token_hex(8)
    public = ECAlgorithm.to_jwk(key.public_key(), as_dict=True) | {"kid": kid, "use": "sig", "alg": "ES256"}
    grants: dict[str, _Grant] = {}  # by code
    basic = base64.b64encode(f"{CLIENT_ID}:{client_secret}".encode()).decode()

    def refuse_other_hosts(request: Request[Any, Any, State]) -> Response[Any] | None:
        # Another name that leads to this machine is that of a web site, whose script must not sign anybody in.
        return None if request.headers.get("host") == urlsplit(issuer).netloc else Response(None, status_code=404)

    @get("/.well-known/openid-configuration", sync_to_thread=False)
    def metadata() -> dict[str, Any]:
        return {
            "issuer": issuer,
            "authorization_endpoint": f"{issuer}/authorize",
            "token_endpoint": f"{issuer}/token",
            "jwks_uri": f"{issuer}/keys",
            "response_types_supported": ["code"],
            "subject_types_supported": ["public"],
            "id_token_signing_alg_values_supported": ["ES256"],
            "code_challenge_methods_supported": ["S256"],
            "token_endpoint_auth_methods_supported": ["client_secret_basic"],
            "authorization_response_iss_parameter_supported": True,
        }

    @get("/keys", sync_to_thread=False)
    def keys() -> dict[str, Any]:
        return {"keys": [public]}

    @get("/authorize", media_type="text/html", sync_to_thread=False)
    def authorize(
        client_id: FromQuery[str],
        asked_uri: Annotated[str, QueryParameter(name="redirect_uri")],
        asked_state: Annotated[str, QueryParameter(name="state", max_length=500)],
        nonce: Annotated[str, QueryParameter(max_length=500)],
        code_challenge: Annotated[str, QueryParameter(max_length=200)],
        response_type: FromQuery[str] = "",
        code_challenge_method: FromQuery[str] = "",
        login: FromQuery[str] = "",
    ) -> Response[Any]:
        """Asks who you are, and then sends the browser back with a code."""
        wanted = (CLIENT_ID, redirect_uri, "code", "S256")
        if (client_id, asked_uri, response_type, code_challenge_method) != wanted:
            return Response("This is not a request of the service.", status_code=400, media_type="text/plain")
        if is_email(login):
            code = secrets.token_urlsafe(32)
            while len(grants) >= CODES:
                del grants[next(iter(grants))]
            grants[code] = _Grant(login, nonce, code_challenge)
            return Redirect(f"{redirect_uri}?{urlencode({'code': code, 'state': asked_state, 'iss': issuer})}")
        asked = {
            "client_id": client_id,
            "redirect_uri": asked_uri,
            "response_type": response_type,
            "state": asked_state,
            "nonce": nonce,
            "code_challenge": code_challenge,
            "code_challenge_method": code_challenge_method,
        }
        fields = "\n".join(
            f'<input type="hidden" name="{name}" value="{html.escape(value)}">' for name, value in asked.items()
        )
        text = "This provider is part of <code>capsule dev</code>. A real one would ask for a password."
        form = FORM.format(fields=fields, owner=OWNER, operator=OPERATOR)
        page, headers = render_page("Sign in", text, form, form_action=f"'self' {redirect_uri}")
        return Response(page, media_type="text/html", headers=headers)

    @post("/token", status_code=200)
    async def exchange(request: Request[Any, Any, State]) -> Response[dict[str, Any]]:
        form = {name: values[0] for name, values in parse_qs((await request.body()).decode()).items()}
        if not secrets.compare_digest(request.headers.get("authorization", ""), f"Basic {basic}"):
            return Response({"error": "invalid_client"}, status_code=401)
        grant = grants.pop(form.get("code", ""), None)
        challenge = hashlib.sha256(form.get("code_verifier", "").encode()).digest()
        encoded = base64.urlsafe_b64encode(challenge).rstrip(b"=").decode()
        if grant is None or encoded != grant.challenge or form.get("redirect_uri") != redirect_uri:
            return Response({"error": "invalid_grant"}, status_code=400)
        now = int(time.time())
        claims = {"iss": issuer, "aud": CLIENT_ID, "sub": grant.email.lower(), "nonce": grant.nonce, "iat": now}
        claims |= {"exp": now + TOKEN_SECONDS, "email": grant.email, "email_verified": True}
        id_token = jwt.encode(claims, key, "ES256", {"kid": kid})
        answer = {"id_token": id_token, "access_token": secrets.token_urlsafe(32), "token_type": "Bearer"}
        return Response(answer, headers={"cache-control": "no-store"})

    return Router(PATH, route_handlers=[metadata, keys, authorize, exchange], before_request=refuse_other_hosts)
