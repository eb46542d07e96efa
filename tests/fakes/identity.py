"""An OpenID provider that does what a test asks, the forbidden included."""

import secrets
import time
from typing import Any
from urllib.parse import parse_qs, urlsplit

import jwt

from tests.fakes.backend import jwk, private_key
from tests.fakes.server import Exchange, FakeServer, Script, answer

CLIENT_ID, CLIENT_SECRET = "capsule", secrets.token_hex(16)


class FakeIdentityProvider(FakeServer):
    """`grant` is what the provider's page does. Codes work again and again, unlike those of a real provider."""

    def __init__(self) -> None:
        super().__init__()
        self.behave()
        self.tokens: dict[str, str] = {}  # code → ID token
        self.subjects: dict[str, str | None] = {}  # Authorization → subject
        self.forms: list[dict[str, list[str]]] = []  # what the token endpoint was sent

    def behave(self) -> None:
        """Does what a provider should, whatever a test has asked before."""
        self.key = private_key("ES256")
        self.kid: str | None = "one"
        self.jwks: Any = None  # replaces the key set
        self.metadata: dict[str, Any] = {}  # replaces members of the metadata
        self.token_answer: dict[str, Any] = {}  # replaces members of the token endpoint's answer
        self.userinfo: dict[str, Any] | None = None
        self.faults: dict[str, Script] = {}  # path → what is answered there instead

    def settings(self, **more: str) -> dict[str, str]:
        names = {"ISSUER": self.address, "CLIENT_ID": CLIENT_ID, "CLIENT_SECRET": CLIENT_SECRET, **more}
        return {f"GATEWAY_OIDC_{name}": value for name, value in names.items()}

    def grant(
        self, location: str, email: str | None = None, /, *, alg: str = "ES256", key: Any = None, **claims: Any
    ) -> dict[str, str]:
        """Returns the parameters with which the browser goes back. A claim of `...` is left out."""
        asked = {name: values[0] for name, values in parse_qs(urlsplit(location).query).items()}
        now = int(time.time())
        payload = {"iss": self.address, "aud": CLIENT_ID, "sub": email, "iat": now, "exp": now + 60}
        payload |= {"nonce": asked["nonce"], "email": email, "email_verified": True, **claims}
        kept = {name: value for name, value in payload.items() if value is not ...}
        code = secrets.token_hex(16)
        signing = None if alg == "none" else key or self.key
        self.tokens[code] = jwt.encode(kept, signing, algorithm=alg, headers=self.kid and {"kid": self.kid})
        self.subjects[f"Bearer access-{code}"] = kept.get("sub")
        return {"code": code, "state": asked["state"]}

    def script(self, exchange: Exchange) -> Script:
        if exchange.path in self.faults:
            return self.faults[exchange.path]
        match exchange.path:
            case "/.well-known/openid-configuration":
                metadata: dict[str, Any] = {"issuer": self.address, "userinfo_endpoint": f"{self.address}/userinfo"}
                for name in ("authorization", "token"):
                    metadata[f"{name}_endpoint"] = f"{self.address}/{name}"
                metadata["jwks_uri"] = f"{self.address}/keys"
                return answer(200, metadata | self.metadata)
            case "/keys":
                return answer(200, self.jwks or {"keys": [jwk("ES256", self.key, str(self.kid))]})
            case "/token":
                form = parse_qs(exchange.body.decode())
                self.forms.append(form)
                id_token = self.tokens.get(form["code"][0])
                if id_token is None:
                    return answer(400, {"error": "invalid_grant"})
                access_token = f"access-{form['code'][0]}"
                tokens = {"id_token": id_token, "access_token": access_token, "token_type": "Bearer"}
                return answer(200, tokens | self.token_answer)
            case "/userinfo":
                subject = self.subjects.get(exchange.header("authorization") or "")
                return answer(200, self.userinfo or {"sub": subject}) if subject else answer(401)
        return answer(404)
