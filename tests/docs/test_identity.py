"""Every example of docs/identity.md runs, and the gateway then accepts tokens made as each provider makes them."""

import base64
import functools
import json
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jwt
import pytest
import pytest_asyncio

from tests.docs.pages import Section, run_node, run_python, run_shell, sections
from tests.fakes import FakeAppBackend
from tests.fakes.backend import jwk, private_key
from tests.fakes.server import Exchange, FakeServer, Script, answer
from tests.support.accounts import Account, App
from tests.support.gateway_process import Gateway

pytestmark = pytest.mark.asyncio(loop_scope="session")

USER = "5c1d0a53-90f5-4ae1-8bd0-6d0a2d7c1b0e"
PRINT_TOKEN = 'import { getToken } from "./lib/auth.js"; console.log(await getToken());'


class IdentityProvider(FakeServer):
    """Serves documents at the addresses of the real provider."""

    def __init__(self) -> None:
        super().__init__()
        self.documents: dict[str, Any] = {}

    def script(self, exchange: Exchange) -> Script:
        document = self.documents.get(exchange.path)
        return answer(404) if document is None else answer(200, document)


class Setup(NamedTuple):
    """An app, called `notes` on the page, and a section whose addresses lead to the test's servers."""

    section: Section
    app: App
    issuer: IdentityProvider
    backend: FakeAppBackend
    folder: Path

    async def shell(self, block: str) -> str:
        account = self.app.account
        for command in ("apps set", "apps check-token"):
            block = block.replace(f"{command} notes ", f"{command} {self.app.name} ")
        service = {"CAPSULE_URL": account.gateway.address, "CAPSULE_API_KEY": account.key}
        done = await run_shell(block, self.folder, **service)
        assert done.code == 0, done.err
        return done.out

    def write(self, block: str) -> None:
        """Writes a block to the file that its first line names."""
        path = self.folder / block.partition("\n")[0].removeprefix("// ")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block)
        (self.folder / "package.json").write_text('{"type": "module"}')

    async def token_of_page(self, stub: str, value: str) -> str:
        """Returns the result of `getToken`, with the file `stub` in place of the provider's own client."""
        self.write(self.section.take("js"))
        (self.folder / stub).write_text(value)
        return (await run_node(PRINT_TOKEN, self.folder)).strip()

    async def status(self, token: str) -> tuple[int, str]:
        signature = token.rpartition(".")[2]
        if len(signature) > 8:
            self.app.gateway.confidential.add(signature)
        answered = await self.app.ask(f"prompt {secrets.token_hex(8)}", token=token)
        return answered.status_code, answered.json().get("error", {}).get("code", "")

    async def accepts(self, token: str) -> None:
        assert await self.status(token) == (200, "")

    async def refuses(self, *tokens: str) -> None:
        for token in tokens:
            assert await self.status(token) == (401, "TOKEN_INVALID"), token


@functools.cache
def rsa() -> Any:
    """Generate an RSA key once, because that is slow."""
    return private_key("RS256")


def claims(**more: Any) -> dict[str, Any]:
    return {"sub": USER, "iat": int(time.time()), "exp": int(time.time()) + 600} | more


def without(claims: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in claims.items() if key != name}


async def pocketbase(local: Setup) -> None:
    await local.shell(local.section.take("sh"))
    token = local.backend.token("abcdefghijklmno", collectionId="_pb_users_auth_", type="auth")
    stub = f"export const pb = {{ authStore: {{ token: {token!r} }} }};"
    await local.accepts(await local.token_of_page("lib/pocketbase.js", stub))
    await local.refuses(local.backend.token(key=private_key("ES256")), local.backend.token(expires=None))


async def supabase(local: Setup) -> None:
    issuer = f"{local.issuer.address}/auth/v1"
    key = private_key("ES256")
    local.issuer.documents["/auth/v1/.well-known/jwks.json"] = {"keys": [jwk("ES256", key, "1")]}
    session = claims(iss=issuer, aud="authenticated", role="authenticated", session_id=USER)
    await local.shell(local.section.take("sh"))
    token = jwt.encode(session, key, "ES256", {"kid": "1"})
    data = json.dumps({"data": {"session": {"access_token": token}}})
    stub = f"export const supabase = {{ auth: {{ getSession: async () => ({data}) }} }};"
    await local.accepts(await local.token_of_page("lib/supabase.js", stub))

    secret = base64.b64encode(secrets.token_bytes(64)).decode()
    local.app.gateway.confidential.add(secret)
    (local.folder / "jwt-secret").write_text(secret)
    await local.shell(local.section.take("sh"))
    await local.accepts(jwt.encode(session, secret, "HS256"))
    anon = {"iss": "supabase", "ref": "abcdefgh", "role": "anon", "exp": session["exp"]}
    await local.refuses(token, jwt.encode(anon, secret, "HS256"))


async def auth0(local: Setup) -> None:
    local.issuer.documents["/.well-known/jwks.json"] = {"keys": [jwk("RS256", rsa(), "1")]}
    issuer = f"{local.issuer.address}/"
    access = claims(sub="auth0|6123", iss=issuer, aud=["notes-api", f"{issuer}userinfo"], azp="client")
    token = jwt.encode(access, rsa(), "RS256", {"kid": "1"})
    await local.shell(local.section.take("sh"))
    stub = f"export const auth0 = {{ getTokenSilently: async () => {token!r} }};"
    await local.accepts(await local.token_of_page("lib/auth0.js", stub))
    of_client = jwt.encode(access | {"aud": "client"}, rsa(), "RS256", {"kid": "1"})
    no_slash = jwt.encode(access | {"iss": local.issuer.address}, rsa(), "RS256", {"kid": "1"})
    await local.refuses(of_client, no_slash, secrets.token_urlsafe(24))


async def keycloak(local: Setup) -> None:
    realm = f"{local.issuer.address}/realms/main"
    keys = f"{realm}/protocol/openid-connect/certs"
    local.issuer.documents["/realms/main/.well-known/openid-configuration"] = {"issuer": realm, "jwks_uri": keys}
    encrypting = jwk("RS256", rsa(), "0") | {"use": "enc", "alg": "RSA-OAEP"}
    local.issuer.documents["/realms/main/protocol/openid-connect/certs"] = {
        "keys": [encrypting, jwk("RS256", rsa(), "1")]
    }
    discovered = json.loads(await local.shell(local.section.take("sh")))
    setting = local.section.take("sh")
    assert f"--auth-jwks {discovered['jwks_uri']} " in setting
    assert f"--issuer {discovered['issuer']} " in setting
    await local.shell(setting)
    access = claims(iss=realm, aud=["notes", "account"], azp="notes", typ="Bearer")
    token = jwt.encode(access, rsa(), "RS256", {"kid": "1"})
    stub = f"export const keycloak = {{ updateToken: async () => true, token: {token!r} }};"
    await local.accepts(await local.token_of_page("lib/keycloak.js", stub))
    for fault in (access | {"aud": "account"}, without(access, "sub"), access | {"iss": f"{realm}2"}):
        await local.refuses(jwt.encode(fault, rsa(), "RS256", {"kid": "1"}))


async def next_auth(local: Setup) -> None:
    await local.shell(local.section.take("sh"))
    for _ in range(2):
        local.write(local.section.take("js"))
    (local.folder / "auth.js").write_text("export const auth = async () => JSON.parse(process.env.SESSION);")
    script = f'import {{ GET }} from "./app/api/token/route.js"; globalThis.fetch = GET; {PRINT_TOKEN}'
    secret = (local.folder / "token-secret").read_text().strip()
    local.app.gateway.confidential.add(secret)

    async def get_token(session: Any) -> str:
        return await run_node(script, local.folder, TOKEN_SECRET=secret, SESSION=json.dumps(session))

    await local.accepts((await get_token({"user": {"id": USER}})).strip())
    with pytest.raises(AssertionError, match="Sign in first"):
        await get_token(None)
    encrypted = ".".join(secrets.token_urlsafe(16) for _ in range(5))
    await local.refuses(encrypted, jwt.encode(claims(aud="another"), secret, "HS256"))


async def own_keys(local: Setup) -> None:
    await run_python(local.section.take("python"), local.folder)
    local.issuer.documents["/.well-known/jwks.json"] = json.loads((local.folder / "jwks.json").read_text())
    assert '"d"' not in (local.folder / "jwks.json").read_text()
    sign = local.section.take("python")
    token = (await run_python(f"{sign}\nprint(token_for({USER!r}))", local.folder)).strip()
    await local.shell(local.section.take("sh"))
    await local.accepts(token)
    key = (local.folder / "private.pem").read_text()
    for fault in (without(claims(iss=local.issuer.address), "exp"), claims(iss="x")):
        await local.refuses(jwt.encode(fault, key, "ES256", {"kid": "2026-11"}))


async def refused_token(local: Setup) -> None:
    token = local.backend.token("ana", aud="us")
    (local.folder / "token").write_text(token)
    shown = await local.shell(local.section.take("sh"))
    assert next(iter(shown.splitlines())).split() == ["user", "ana"]
    head, payload = (await run_python(local.section.take("python"), local.folder, USER_TOKEN=token)).splitlines()
    assert "'alg': 'ES256'" in head
    assert "'sub': 'ana'" in payload


EXAMPLES: dict[str, Callable[[Setup], Awaitable[None]]] = {
    "PocketBase": pocketbase,
    "Supabase": supabase,
    "Auth0": auth0,
    "Keycloak": keycloak,
    "next-auth": next_auth,
    "Your own keys": own_keys,
    "When a token is refused": refused_token,
}


@pytest_asyncio.fixture(loop_scope="session")
async def issuer() -> AsyncIterator[IdentityProvider]:
    async with IdentityProvider() as issuer:
        yield issuer


@pytest.mark.parametrize("title", sections("identity.md", {}))
async def test_a_section(
    title: str, gateway: Gateway, account: Account, backend: FakeAppBackend, issuer: IdentityProvider, tmp_path: Path
) -> None:
    hosts = ("abcdefgh.supabase.co", "tenant.eu.auth0.com", "id.example.com", "notes.example.com")
    addresses = {f"https://{host}": issuer.address for host in hosts} | {"https://pb.example.com": backend.address}
    section = sections("identity.md", addresses)[title]
    await EXAMPLES[title](Setup(section, await account.app(backend), issuer, backend, tmp_path))
    assert not section.left
