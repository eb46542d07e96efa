"""The check of an app's `auth` when it is saved. It is saved in any case."""

from typing import Any

import msgspec
import pytest

from gateway.inference.auth.auth_checks import check_auth
from tests.fakes import FakeAppBackend
from tests.fakes.backend import jwk
from tests.fakes.server import CLOSE, HANG, Script, answer
from tests.gateway.inference.auth.conftest import Verifier
from tests.gateway.inference.key_hosts import an_app
from tests.support.accounts import App

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def save(app: App, auth: dict[str, Any] | None) -> dict[str, Any]:
    """Returns the check's result, after checking that the settings are saved."""
    at = f"/account/apps/{app.name}"
    response = await app.account.call("PATCH", at, {"auth": auth})
    assert response.status_code == 200, response.text
    saved = response.json()
    result: dict[str, Any] = saved.pop("authCheck")
    assert (await app.account.get(f"{at}/settings")).json() == saved
    assert saved["auth"] == (auth or {"kind": "jwks"})
    assert result["ok"] != ("problem" in result)
    return result


async def test_a_key_set(app: App, backend: FakeAppBackend) -> None:
    fetches = backend.fetches
    result = await save(app, {"kind": "jwks", "url": backend.jwks_url, "issuer": "https://iss.example"})
    assert result == {"ok": True, "keys": 3, "algorithms": ["ES256", "Ed25519", "EdDSA", "RS256"]}
    assert backend.fetches == fetches + 1


FAULTS: dict[str, tuple[Script, str]] = {
    "500": (answer(500), "status 500"),
    "closed": ([CLOSE], "could not be reached"),
    "silent": ([HANG], "did not answer in time"),
    "HTML": (answer(200, b"<html>"), "not a key set"),
    "megabytes": (answer(200, b" " * 300_000), "more than"),
}


@pytest.mark.parametrize("case", FAULTS)
async def test_a_faulty_key_set(alone: Verifier, case: str) -> None:
    alone.backend.jwks, problem = FAULTS[case]
    check = await check_auth(alone.users, an_app(auth=alone.key_set()), allow_private=True)
    assert (check.ok, check.keys) == (False, msgspec.UNSET)
    assert problem in str(check.problem)
    assert alone.backend.fetches == 1


async def test_an_empty_key_set(app: App) -> None:
    async with FakeAppBackend() as backend:
        encryption = {**jwk("ES256", backend.keys["ES256"][1], "k"), "use": "enc"}
        for keys in ([], [encryption]):
            backend.jwks = answer(200, {"keys": keys})
            result = await save(app, {"kind": "jwks", "url": backend.jwks_url})
            assert (result["ok"], result["keys"], result["algorithms"]) == (False, 0, [])


async def test_a_secret_needs_no_call(app: App) -> None:
    app.gateway.confidential.add(secret := "s" * 40)
    body = {"auth": {"kind": "secret", "secret": secret}}
    answer = await app.account.call("PATCH", f"/account/apps/{app.name}", body)
    assert answer.json()["authCheck"] == {"ok": True, "algorithms": ["HS256", "HS384", "HS512"]}


async def test_a_backend(app: App) -> None:
    async with FakeAppBackend() as backend:
        auth = {"kind": "backend", "url": backend.refresh_url, "method": "POST", "userField": "record.id"}
        assert await save(app, auth) == {"ok": True}
        assert backend.refreshes == 1
        assert "status 405" in (await save(app, {"kind": "backend", "url": backend.refresh_url}))["problem"]
        assert "status 404" in (await save(app, {**auth, "url": f"{backend.address}/other"}))["problem"]
        backend.refresh = answer(200, {"record": {"id": "anyone"}})
        assert "nobody signed" in (await save(app, auth))["problem"]
        backend.refresh = answer(200, b"null")
        assert (await save(app, auth))["ok"]
