"""How long the gateway relies on what it knows: verified tokens, an app's keys, a backend's failure."""

import pytest

from gateway.inference import users
from tests.fakes import FakeAppBackend
from tests.fakes.server import answer
from tests.gateway.conftest import Launch
from tests.support.accounts import App
from tests.support.gateway_process import Gateway
from tests.support.polling import wait_until
from tests.support.responses import refused

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def status(app: App, token: str | None = None) -> int:
    return (await app.ask("x", token=token)).status_code


async def test_rotated_keys_are_found(gw: Gateway) -> None:
    async with FakeAppBackend() as backend:
        app = await gw.app(backend)
        assert await status(app) == 200
        old = app.token("old")
        backend.rotate("ES256")

        async def new_passes() -> bool:
            return await status(app, app.token("new")) == 200

        await wait_until(new_passes, 12, 0.5)
        assert backend.fetches <= 3
        refused(await app.ask("x", token=old), 401, "TOKEN_INVALID")  # its key is gone
        fetches = backend.fetches
        for _ in range(3):
            stranger = FakeAppBackend("ES256").token()
            refused(await app.ask("x", token=stranger), 401, "TOKEN_INVALID")
        assert backend.fetches <= fetches + 1


async def test_a_backend_that_comes_back(gw: Gateway) -> None:
    """The gateway soon forgets a failure, and still does not ask again for every request."""
    async with FakeAppBackend() as backend:
        app = await gw.app(backend)
        backend.jwks = answer(500)
        for _ in range(30):
            refused(await app.ask("x"), 503, "APP_BACKEND_UNREACHABLE")
        assert backend.fetches <= 30
        backend.jwks = None

        async def passes() -> bool:
            return await status(app) == 200

        await wait_until(passes, 12, 0.5)


async def test_a_verified_token_is_remembered_for_at_most_a_minute(launch: Launch) -> None:
    """By then a signed-out user is out, and so is a token of a key that was withdrawn.

    The test's minute takes 4 seconds, and the keys are fetched again after 10 as in production.
    """
    assert users.TOKEN_LIFE == 60
    async with launch({"gateway.inference.users.TOKEN_LIFE": 4}) as gw, FakeAppBackend() as backend:
        auth = {"kind": "backend", "url": backend.refresh_url, "method": "POST", "userField": "record.id"}
        signed_out, withdrawn = await gw.app(backend, auth=auth), await gw.app(backend)
        tokens = {app: app.token() for app in (signed_out, withdrawn)}
        assert [await status(app, token) for app, token in tokens.items()] == [200, 200]
        backend.refresh = answer(401, {"message": "signed out"})
        backend.rotate("ES256")

        async def fetches_keys() -> bool:
            return await status(withdrawn, withdrawn.token("new")) == 200

        async def is_out(app: App) -> bool:
            return await status(app, tokens[app]) == 401

        await wait_until(lambda: is_out(signed_out), 6, 0.5)
        await wait_until(fetches_keys, 12, 0.5)
        await wait_until(lambda: is_out(withdrawn), 6, 0.5)
