"""The provider over TLS: a private authority and a base path. test_connector.py tests what is not trusted."""

from pathlib import Path

import pytest

from tests.fakes import FakeAppBackend, FakeProvider
from tests.fakes.provider import ROLE, chunk, tokens
from tests.fakes.receiver import certificate
from tests.fakes.server import HANG
from tests.gateway.conftest import Launch
from tests.support.polling import PATIENCE_SECONDS, wait_until
from tests.support.responses import answered, text_of


@pytest.mark.asyncio(loop_scope="session")
async def test_a_trusted_authority(launch: Launch, backend: FakeAppBackend, tmp_path: Path) -> None:
    context, file = certificate(tmp_path, "localhost")
    async with FakeProvider(context) as secure:
        url = f"https://localhost:{secure.port}/project-7/v1/"
        async with launch(GATEWAY_PROVIDER_URL=url, GATEWAY_CA_FILE=file) as gw:
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
            await wait_until(lambda: secure.asked(left)[0].canceled.is_set(), PATIENCE_SECONDS)
