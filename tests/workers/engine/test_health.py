"""Which answers show that a release is up. What follows for its deploy is in the drivers' contract."""

import asyncio

import pytest

from gateway.deploys.release import Release
from tests.fakes.start_commands import http_server
from workers.engine.health import NotUp, request_health

# The path of its health check, what it answers at which path (and 200 at all others), and whether it is up.
ANSWERS = [
    *[("", "/", status, True) for status in (200, 302, 401, 404, 405, 429)],
    *[("", "/", status, False) for status in (500, 503)],
    *[("/healthz", "/healthz", status, True) for status in (204, 301)],
    *[("/healthz", "/healthz", status, False) for status in (401, 404, 500)],
    ("/healthz", "/", 500, True),
]


@pytest.mark.parametrize(("health", "path", "status", "is_up"), ANSWERS)
async def test_a_release_is_up_as_its_health_check_says(health: str, path: str, status: int, is_up: bool) -> None:
    async def answer(host: str, asked: str) -> tuple[int, str]:
        assert host == "shop.apps.test"
        return (status if asked == path else 200), ""

    async with await asyncio.start_server(http_server(answer), "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        request = request_health(Release("digest", 1, runs=True, health=health), url, "shop.apps.test")
        if is_up:
            return await request
        with pytest.raises(NotUp, match=f"^GET {path} returned {status}$") as refused:
            await request
        assert refused.value.status == status
