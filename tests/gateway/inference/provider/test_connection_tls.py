"""The provider over TLS: a private authority, the host name, and a base path."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.fakes import FakeAppBackend, FakeProvider
from tests.fakes.provider import ROLE, chunk, tokens
from tests.fakes.receiver import certificate
from tests.fakes.server import HANG
from tests.gateway.conftest import Launch
from tests.support.polling import wait_until
from tests.support.responses import answered, refused, text_of

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest_asyncio.fixture(loop_scope="session")
async def secure(tmp_path: Path) -> AsyncIterator[FakeProvider]:
    context, _ = certificate(tmp_path, "localhost")
    async with FakeProvider(context) as provider:
        yield provider


async def test_a_trusted_authority(
    launch: Launch, secure: FakeProvider, backend: FakeAppBackend, tmp_path: Path
) -> None:
    url = f"https://localhost:{secure.port}/project-7/v1/"
    async with launch(GATEWAY_PROVIDER_URL=url, GATEWAY_CA_FILE=str(tmp_path / "localhost.pem")) as gw:
        app = await gw.app(backend)
        big = "x" * 300_000
        prompt = secure.plays(tokens("Bon", "jour", big))
        assert answered(await app.ask(prompt))["text"] == "Bonjour" + big
        assert text_of(await app.events(prompt)) == "Bonjour" + big
        assert {e.path for e in secure.asked(prompt)} == {"/project-7/v1/chat/completions"}
        assert len({e.connection for e in secure.asked(prompt)}) == 1
        left = secure.plays(ROLE, chunk("a"), HANG)
        async with app.stream(left) as source:
            await anext(source.aiter_sse())
        await wait_until(lambda: secure.asked(left)[0].canceled.is_set(), 1)


async def test_an_untrusted_authority(launch: Launch, secure: FakeProvider, backend: FakeAppBackend) -> None:
    async with launch(GATEWAY_PROVIDER_URL=f"https://localhost:{secure.port}/v1") as gw:
        app = await gw.app(backend)
        refused(await app.ask("x"), 502, "PROVIDER_UNREACHABLE")
        assert secure.exchanges == []
        assert await app.account.settled() == 0


async def test_a_certificate_of_another_name(launch: Launch, backend: FakeAppBackend, tmp_path: Path) -> None:
    context, file = certificate(tmp_path, "elsewhere.example")
    async with FakeProvider(context) as impostor:
        url = f"https://localhost:{impostor.port}/v1"
        async with launch(GATEWAY_PROVIDER_URL=url, GATEWAY_CA_FILE=file) as gw:
            refused(await (await gw.app(backend)).ask("x"), 502, "PROVIDER_UNREACHABLE")
            assert impostor.exchanges == []
