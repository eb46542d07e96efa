"""A process without free descriptors, which reveals nothing about the provider."""

import asyncio
import json
import os
import resource

import pytest

from tests.fakes import FakeAppBackend, FakeProvider
from tests.fakes.provider import tokens
from tests.fakes.server import CLOSE, Raw
from tests.gateway.conftest import Launch
from tests.support.inference_status import OPERATIONAL, status
from tests.support.polling import wait_until
from tests.support.responses import answered, refused

pytestmark = pytest.mark.asyncio(loop_scope="session")


def descriptors(pid: int) -> set[int]:
    return {int(name) for name in os.listdir(f"/proc/{pid}/fd")}


def lowest_free(pid: int) -> int:
    used = descriptors(pid)
    return min(set(range(len(used) + 1)) - used)


async def settled(pid: int) -> bool:
    """Returns whether no connection is closing, which would free its descriptor after the limit was set."""
    before = descriptors(pid)
    await asyncio.sleep(0.2)
    return descriptors(pid) == before


async def test_running_out_of_descriptors_is_not_the_providers_fault(launch: Launch, backend: FakeAppBackend) -> None:
    """Requests do not get PROVIDER_UNREACHABLE, and the status does not change."""
    async with FakeProvider() as provider, launch(GATEWAY_PROVIDER_URL=provider.url) as gw:
        app = await gw.app(backend)
        closing = provider.plays(tokens("x"), Raw(b"0\r\n\r\n"), CLOSE)
        answered(await app.ask(closing))
        pid = gw.pid
        soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        try:
            seen = len(provider.exchanges)
            for stream in (True, False, False, False):
                await wait_until(lambda: settled(pid))
                resource.prlimit(pid, resource.RLIMIT_NOFILE, (lowest_free(pid), hard))
                response = await app.ask("Anyone?", stream=stream)
                error = refused(response, 503, "BACKBONE_UNAVAILABLE")
                assert response.headers["Retry-After"] == "1"
                assert "store" not in error["message"]
            assert (len(provider.exchanges), await status(gw)) == (seen, OPERATIONAL)
        finally:
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
        lines = [json.loads(line) for line in gw.log.splitlines() if "connections.exhausted" in line]
        assert lines
        assert lines[0]["level"] == "error"
        await wait_until(lambda: provider.exchanges)
        answered(await app.ask("x"))
        assert await status(gw) == OPERATIONAL
