"""The tutorial, run as it is written, with the running service's addresses in place of the page's."""

import re
import shlex
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from tests.docs.pages import run, sections
from tests.support.dev_process import Run, start
from tests.support.folders import passable_folder
from tests.support.redis_servers import five_free_ports

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(400)]


@pytest_asyncio.fixture(loop_scope="session")
async def service() -> AsyncIterator[Run]:
    with passable_folder() as folder:
        service = await start(five_free_ports(), folder)
        await service.read(until="Press Ctrl-C to stop.")
        yield service
        assert await service.stop() == 0


async def test_the_tutorial(service: Run, tmp_path: Path) -> None:
    addresses = {"localhost:8000": f"localhost:{service.port}", "localhost:8001": f"localhost:{service.port + 1}"}
    page = sections("first-capsule.md", addresses)
    assert page["Start the service"].take("sh") == "make run\n"
    blocks: list[str] = []
    for title in ("Write the app", "Publish it", "Change it", "Look inside", "Pages only"):
        while page[title].has("sh"):
            blocks.append(page[title].take("sh"))
    script = [f"cd {shlex.quote(str(Path(__file__).parents[2]))}", *blocks]
    done = await run("bash", "-euc", "\n".join(script), folder=tmp_path, given=f"{service.api_key}\n", seconds=300)
    assert done.code == 0, done.out + done.err
    assert re.findall(r"^Live at (\S+) after", done.out, re.MULTILINE) == [
        f"http://notes.apps.localhost:{service.port + 1}" for _ in range(3)
    ] + [f"http://leaflet.apps.localhost:{service.port + 1}"]
    assert "BETTER_AUTH_SECRET" in done.out
    async with httpx.AsyncClient(base_url=service.hosted, trust_env=False, timeout=30) as http:
        for app, title in (("notes", "notes"), ("leaflet", "leaflet")):  # after the rollback
            shown = await http.get("/", headers={"Host": f"{app}.apps.localhost:{service.port + 1}"})
            assert f"<title>{title}</title>" in shown.text
