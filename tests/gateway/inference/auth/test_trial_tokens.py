"""Test tokens: the account holder tries an app of their own."""

import base64
import datetime
import json
import time

import httpx
import pytest

from gateway.accounts.records import App as Record
from gateway.accounts.vault import Vault
from gateway.errors import TokenInvalid
from gateway.inference.auth.trial_tokens import is_test_token, sign_test_token, verify_test_token
from tests.fakes import FakeAppBackend
from tests.support.accounts import App
from tests.support.gateway_process import Gateway
from tests.support.responses import refused

pytestmark = pytest.mark.asyncio(loop_scope="session")

RECORD = Record(id="app-1", name="notes", account="acc_1", createdAt="2026-07-02T10:00:00.000Z")


async def issue(app: App) -> str:
    response = await app.account.call("POST", f"/account/apps/{app.name}/test-token")
    assert response.status_code == 200, response.text
    token: str = response.json()["token"]
    app.gateway.confidential.add(token.rpartition(".")[2])
    return token


async def ask(app: App, token: str, **headers: str) -> httpx.Response:
    return await app.post({"prompt": "x"}, headers=app.headers(token, **headers))


async def test_it_is_valid_for_ten_minutes_while_the_backend_is_away(gw: Gateway) -> None:
    async with FakeAppBackend() as backend:
        app = await gw.app(backend)
    before = await app.account.settled()
    response = await app.account.call("POST", f"/account/apps/{app.name}/test-token")
    expires = datetime.datetime.fromisoformat(response.json()["expiresAt"]).timestamp()
    assert 595 < expires - time.time() < 605
    answered = await ask(app, response.json()["token"])
    assert answered.status_code == 200, answered.text
    assert await app.account.settled() > before


async def test_the_services_own_page_may_ask_with_it_and_with_no_other_token(app: App) -> None:
    own = str(app.gateway.http.base_url).rstrip("/")
    token = await issue(app)
    response = await ask(app, token, Origin=own)
    assert response.status_code == 200, response.text
    assert response.headers["access-control-allow-origin"] == own
    refused(await ask(app, app.token(), Origin=own), 403, "ORIGIN_NOT_ALLOWED")
    refused(await ask(app, token, Origin="https://evil.example.com"), 403, "ORIGIN_NOT_ALLOWED")


async def test_it_ends_with_the_app(app: App, gw: Gateway) -> None:
    token, other = await issue(app), await app.account.app(app.backend)
    refused(await ask(other, token), 401, "TOKEN_INVALID")
    assert (await gw.platform("DELETE", f"apps/{app.name}")).status_code == 204
    refused(await ask(app, token), 404, "APP_NOT_FOUND")
    body = {"account": app.account.id, "auth": {"kind": "jwks", "url": app.backend.jwks_url}}
    assert (await gw.platform("PUT", f"apps/{app.name}", body)).status_code in (200, 201)
    refused(await ask(app, token), 401, "TOKEN_INVALID")
    assert (await ask(app, await issue(app))).status_code == 200


async def test_a_changed_one_is_refused(app: App) -> None:
    head, payload, signature = (await issue(app)).split(".")
    claims = json.loads(base64.urlsafe_b64decode(payload + "=="))
    forged = base64.urlsafe_b64encode(json.dumps({**claims, "sub": "ana"}).encode()).rstrip(b"=").decode()
    for token in (f"{head}.{forged}.{signature}", f"{head}.{payload}.", f"{head}.{payload}", f"{head}.", f"{head}.é.x"):
        response = await app.post({"prompt": "x"}, headers={"Authorization": f"Bearer {token}".encode()})
        refused(response, 401, "TOKEN_INVALID")


async def test_it_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    vault = Vault("a key")
    signed = sign_test_token(vault, RECORD)
    token = signed.token.encode()
    assert is_test_token(token)
    assert verify_test_token(vault, RECORD, token)["sub"] == "owner"
    times = iter([signed.expires_at - 0.01, float(signed.expires_at)])
    monkeypatch.setattr(time, "time", lambda: next(times))
    verify_test_token(vault, RECORD, token)
    with pytest.raises(TokenInvalid):
        verify_test_token(vault, RECORD, token)


async def test_keys_rotate() -> None:
    token = sign_test_token(Vault("old"), RECORD).token.encode()
    assert verify_test_token(Vault("new,old"), RECORD, token)["sub"] == "owner"
    for keys in ("new", ""):
        with pytest.raises(TokenInvalid):
            verify_test_token(Vault(keys), RECORD, token)
