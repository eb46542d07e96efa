"""Keys and backends at an app's own address, which may be private although customers' addresses may not."""

from collections.abc import AsyncIterator

import pytest

from tests.fakes import FakeAppBackend, FakeProvider
from tests.support.fixtures import module_fixture
from tests.support.gateway_process import Gateway, gateway_with_redis
from tests.support.responses import refused

pytestmark = pytest.mark.asyncio(loop_scope="session")

KEYS = {"kind": "jwks", "url": "/.well-known/jwks.json"}
CALL = {"kind": "backend", "url": "/api/collections/users/auth-refresh", "method": "POST", "userField": "record.id"}


@module_fixture
async def apps() -> AsyncIterator[FakeAppBackend]:
    """Answers at the address of every app."""
    async with FakeAppBackend() as backend:
        yield backend


@module_fixture
async def strict(
    provider: FakeProvider, apps: FakeAppBackend, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Gateway]:
    """A gateway that refuses customers' private addresses, as in production."""
    settings = {"GATEWAY_ALLOW_PRIVATE_ADDRESSES": "false", "GATEWAY_APPS_URL": f"http://{{host}}:{apps.port}"}
    async with gateway_with_redis(provider, tmp_path_factory.mktemp("strict"), **settings) as running:
        yield running


@pytest.mark.parametrize("auth", [KEYS, CALL], ids=["jwks", "backend"])
async def test_an_app_verifies_its_users_itself(strict: Gateway, apps: FakeAppBackend, auth: dict[str, str]) -> None:
    app = await strict.app(apps, auth=auth)
    assert (await app.ask("x")).status_code == 200
    assert apps.exchanges[-1].header("host") == f"{app.name}.apps.localhost:{apps.port}"
    refused(await app.ask("x", token=FakeAppBackend().token()), 401, "TOKEN_INVALID")
    shown = await app.account.call("GET", f"/account/apps/{app.name}/settings")
    assert shown.json()["auth"]["url"] == auth["url"]


async def test_other_addresses_stay_refused(strict: Gateway, apps: FakeAppBackend) -> None:
    app = await strict.app(apps, auth=KEYS)
    for url in ("http://example.com/keys", "//169.254.169.254/keys", "/\\169.254.169.254/keys", "/a b"):
        answer = await app.account.call("PATCH", f"/account/apps/{app.name}", {"auth": {"kind": "jwks", "url": url}})
        assert "auth.url" in refused(answer, 400, "REQUEST_MALFORMED")["message"]


@pytest.mark.parametrize("kind", ["jwks", "backend"])
async def test_an_address_that_is_not_public_is_saved_and_named(
    strict: Gateway, backend: FakeAppBackend, kind: str
) -> None:
    app = await strict.app(backend, auth={"kind": "jwks"})
    fetches = backend.fetches
    for url in ("https://169.254.169.254/keys", "https://[::1]/", "https://keys.internal/", backend.jwks_url):
        auth = {"kind": kind, "url": url}
        saved = (await app.account.call("PATCH", f"/account/apps/{app.name}", {"auth": auth})).json()
        assert saved["auth"] == auth
        assert "not public" in saved["authCheck"]["problem"]
    refused(await app.ask("x"), 503, "APP_BACKEND_UNREACHABLE")
    assert backend.fetches == fetches
