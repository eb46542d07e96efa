"""How long the gateway relies on what it knows: verified tokens, an app's keys, a backend's failure."""

import time

import pytest

from gateway.inference import key_sets, users
from tests.fakes import FakeAppBackend
from tests.fakes.server import answer
from tests.gateway.inference.conftest import BRISK
from tests.support.accounts import App
from tests.support.gateway_process import Gateway
from tests.support.polling import wait_until
from tests.support.responses import refused

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def status(app: App, token: str | None = None) -> int:
    return (await app.ask("x", token=token)).status_code


async def test_rotated_keys_are_found(brisk: Gateway) -> None:
    """Within the interval between two fetches, which is 10 seconds in production."""
    assert key_sets.FETCH_INTERVAL == 10
    async with FakeAppBackend() as backend:
        app = await brisk.app(backend)
        assert await status(app) == 200
        old = app.token("old")
        backend.rotate("ES256")

        async def new_passes() -> bool:
            return await status(app, app.token("new")) == 200

        await wait_until(new_passes, 10, 0.2)
        assert backend.fetches <= 3
        refused(await app.ask("x", token=old), 401, "TOKEN_INVALID")  # its key is gone
        fetches, began = backend.fetches, time.monotonic()
        for _ in range(3):
            stranger = FakeAppBackend("ES256").token()
            refused(await app.ask("x", token=stranger), 401, "TOKEN_INVALID")
        passed = time.monotonic() - began
        assert backend.fetches <= fetches + 1 + passed // BRISK["gateway.inference.key_sets.FETCH_INTERVAL"]


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


async def test_a_verified_token_is_remembered_for_at_most_a_minute(brisk: Gateway) -> None:
    """By then a signed-out user is out, and so is a token of a key that was withdrawn.

    The test's minute takes 2 seconds.
    """
    assert users.TOKEN_LIFE == 60
    async with FakeAppBackend() as backend:
        auth = {"kind": "backend", "url": backend.refresh_url, "method": "POST", "userField": "record.id"}
        signed_out, withdrawn = await brisk.app(backend, auth=auth), await brisk.app(backend)
        tokens = {app: app.token() for app in (signed_out, withdrawn)}
        assert [await status(app, token) for app, token in tokens.items()] == [200, 200]
        backend.refresh = answer(401, {"message": "signed out"})
        backend.rotate("ES256")

        async def fetches_keys() -> bool:
            return await status(withdrawn, withdrawn.token("new")) == 200

        async def is_out(app: App) -> bool:
            return await status(app, tokens[app]) == 401

        await wait_until(lambda: is_out(signed_out), 6, 0.2)
        await wait_until(fetches_keys, 6, 0.2)
        await wait_until(lambda: is_out(withdrawn), 6, 0.2)
