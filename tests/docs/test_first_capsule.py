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
    page = sections("first-capsule.md", {"https://api.example.com": f"http://localhost:{service.port}"})
    # The clone has the command line. tests/gateway/api/test_install.py installs it.
    assert page["Get the command line"].take("sh") == f"curl -fsSL http://localhost:{service.port}/install.sh | sh\n"
    own = page["A service on your machine"]
    assert own.take("sh") == "make run\n"
    blocks = [own.take("sh")]
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
