"""What takes its real time: all of it at once, in about a minute."""

import asyncio
import time

import pytest

from tests.expect import answered, refused
from tests.fakes import FakeAppBackend, FakeProvider
from tests.fakes.provider import answer
from tests.gateway.conftest import Launch
from tests.gateway.inference.test_availability import becomes
from tests.polling import wait_until
from tests.runner import Gateway
from tests.tenants import App

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def windows_slide(app: App) -> None:
    """`Retry-After` is true, refusals were not counted, and each request leaves the window on its own."""
    passed: list[float] = []
    for pause in [0.0] * 10 + [3.0] + [0.0] * 9:
        await asyncio.sleep(pause)
        assert (await app.ask("x")).status_code == 200
        passed.append(time.monotonic())
    while time.monotonic() < passed[0] + 55:
        response = await app.ask("x")
        refused(response, 429, "USER_RATE_LIMITED")
        told = time.monotonic() + int(response.headers["Retry-After"])
        assert 0 <= told - (passed[0] + 60) + 0.1 <= 1.2, "when the next one can pass, in whole seconds"
        await asyncio.sleep(5)
    while (response := await app.ask("x")).status_code == 429:
        await asyncio.sleep(0.1)
    waited = time.monotonic() - passed[0]
    assert 59.8 < waited < 61.5
    await asyncio.sleep(1)
    statuses = [response.status_code] + [(await app.ask("x")).status_code for _ in range(12)]
    # Ten came at first and have left; the other ten are younger by three seconds.
    assert statuses.count(200) == 10
    await asyncio.sleep(3.2)
    assert (await app.ask("x")).status_code == 200


async def a_refused_credential_heals(launch: Launch, backend: FakeAppBackend) -> None:
    async with FakeProvider() as provider, launch(GATEWAY_PROVIDER_URL=provider.url) as gw:
        app = await gw.app(backend)
        provider.models_status = 401
        refused(await app.ask(provider.plays(answer(401))), 502, "PROVIDER_ERROR")
        await becomes(gw, ("misconfigured", False))
        provider.models_status = 200
        began, seen = time.monotonic(), len(provider.probes)
        await becomes(gw, ("operational", True), 36)
        assert time.monotonic() - began > 5, "once in 30 s, not at once"
        assert len(provider.probes) <= seen + 2
        answered(await app.ask("x"))


async def rotated_keys_are_found(gw: Gateway) -> None:
    async with FakeAppBackend() as backend:
        app = await gw.app(backend)
        assert (await app.ask("x")).status_code == 200
        old = app.token("old")
        backend.rotate("ES256")

        async def new_passes() -> bool:
            return (await app.ask("x", token=app.token("new"))).status_code == 200

        await wait_until(new_passes, 12, 0.5)
        assert backend.fetches <= 3

        async def old_fails() -> bool:
            """Its key is gone; nothing remembers it beyond a minute."""
            return (await app.ask("x", token=old)).status_code == 401

        await wait_until(old_fails, 62, 2)
        fetches = backend.fetches
        for _ in range(3):
            stranger = FakeAppBackend("ES256").token()
            refused(await app.ask("x", token=stranger), 401, "TOKEN_INVALID")
        assert backend.fetches <= fetches + 1


async def a_backend_that_comes_back(gw: Gateway) -> None:
    """Its failure is not remembered for long, nor asked about at every request."""
    async with FakeAppBackend() as backend:
        app = await gw.app(backend)
        backend.jwks = answer(500)
        for _ in range(30):
            refused(await app.ask("x"), 503, "APP_BACKEND_UNREACHABLE")
        assert backend.fetches <= 30
        backend.jwks = None

        async def passes() -> bool:
            return (await app.ask("x")).status_code == 200

        await wait_until(passes, 12, 0.5)


async def a_token_ends_at_its_backend(gw: Gateway) -> None:
    """A verified token is remembered for at most a minute: a signed-out user is out by then."""
    async with FakeAppBackend() as backend:
        auth = {"kind": "backend", "url": backend.refresh_url, "method": "POST", "userField": "record.id"}
        app = await gw.app(backend, auth=auth)
        token = app.token()
        assert (await app.ask("x", token=token)).status_code == 200
        backend.refresh = answer(401, {"message": "signed out"})

        async def out() -> bool:
            return (await app.ask("x", token=token)).status_code == 401

        await wait_until(out, 62, 4)


async def test_patience(app: App, gw: Gateway, launch: Launch, backend: FakeAppBackend) -> None:
    async with asyncio.TaskGroup() as group:
        for story in (
            windows_slide(app),
            a_refused_credential_heals(launch, backend),
            rotated_keys_are_found(gw),
            a_backend_that_comes_back(gw),
            a_token_ends_at_its_backend(gw),
        ):
            group.create_task(story)
