"""`capsule deploys`: publishing, and following a deploy, at a stub of the service."""

import asyncio
import io
import re
import shutil
import subprocess
import tarfile
import zipfile
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import pytest

from tests.capsule_gateway.cli.conftest import Service
from tests.fakes.server import Exchange, Script, answer
from tests.support.command_line import Tool, run_in_terminal

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "shop"
    folder.mkdir()
    (folder / "index.html").write_text("<h1>Shop</h1>")
    (folder / ".env").write_text("SECRET=1")
    return folder


def unpack(exchange: Exchange) -> dict[str, bytes]:
    """Returns the files of an upload."""
    with tarfile.open(fileobj=io.BytesIO(exchange.body)) as tar:
        return {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]


async def test_publish(stubbed: Tool, service: Service, folder: Path) -> None:
    service.replies = [answer(202, {"deployId": "dep_1"})]
    assert re.fullmatch(
        rf"Details: {service.address}/dashboard#/deploys/dep_1\n"
        r"Published 1 file \(\d+ bytes packed, 1 left out\) as dep_1\.\n"
        r"Follow it with: capsule deploys show dep_1 --follow\n",
        (await stubbed("deploys", "publish", "shop", str(folder))).out,
    )
    page, archive, other = folder / "index.html", folder / "Shop.ZIP", folder / "shop.rar"
    with zipfile.ZipFile(archive, "w") as made:
        made.write(page, "index.html")
    for file in (page, archive):
        assert "Published 1 file" in (await stubbed("deploys", "publish", "shop", str(file))).out
    packed, *files = service.exchanges
    assert unpack(packed) == {"index.html": page.read_bytes()}
    sent = [(each.header("content-type"), each.body) for each in files]
    assert sent == [("text/html", page.read_bytes()), ("application/zip", archive.read_bytes())]
    assert {call.partition("?")[0] for call in service.calls} == {"PUT /account/apps/shop/source"}
    other.touch()
    refusal = await stubbed.refused("deploys", "publish", "shop", str(other))
    assert "shop.rar can't be published; name a folder, an .html page, or a .zip or .tar.gz archive" in refusal
    for file in (page, archive, other):
        file.unlink()
    assert "nothing to publish" in await stubbed.refused("deploys", "publish", "shop", str(folder))


@pytest.fixture
def checkout(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The commit of the folder, which is on the branch `Fix/The-Cart`."""
    for name in ("GIT_AUTHOR", "GIT_COMMITTER"):
        monkeypatch.setenv(f"{name}_NAME", "Ada")
        monkeypatch.setenv(f"{name}_EMAIL", "ada@example.com")
    git(folder, "init", "-q", "-b", "Fix/The-Cart")
    git(folder, "add", "index.html")
    git(folder, "commit", "-q", "-m", "Count the \033[31mitems\n\nAll of them.")
    return git(folder, "rev-parse", "HEAD")


def git(folder: Path, *arguments: str) -> str:
    words = ["git", "-C", str(folder), *arguments]
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()


async def test_what_is_said_of_a_source(stubbed: Tool, service: Service, folder: Path, checkout: str) -> None:
    async def publish(*more: str) -> dict[str, str]:
        await stubbed("deploys", "publish", "shop", str(folder), *more)
        return dict(parse_qsl(service.exchanges[-1].path.partition("?")[2]))

    service.replies = [answer(202, {"deployId": "dep_1"})]
    described = {"message": "Count the [31mitems", "commit": checkout, "branch": "Fix/The-Cart"}
    (folder / ".env").unlink()
    assert await publish() == {**described, "dirty": "false"}
    (folder / "new.html").touch()
    assert await publish("-m", "Try it") == {**described, "message": "Try it", "dirty": "true"}
    assert await publish("--preview", "other") == {**described, "dirty": "true", "preview": "other"}
    shutil.rmtree(folder / ".git")
    git(folder, "init", "-q", "-b", "main")
    assert await publish() == {}, "there is no commit"


@pytest.mark.usefixtures("quick_follow", "checkout")
async def test_a_preview(stubbed: Tool, service: Service, folder: Path) -> None:
    (folder / "capsule.toml").write_text('name = "shop"\n[build]\noutput = "."\n')
    url = "https://shop--p-fix-the-cart.apps.localhost"
    service.answers["GET /account/apps"] = [{"name": "shop"}]
    service.answers["GET /account/deploys/dep_1"] = {"state": "live", "kind": "preview", "url": url, "durationMs": 5}
    service.replies = [answer(202, {"deployId": "dep_1"})]
    run = await stubbed("deploy", str(folder), "--preview")
    assert f"\nPreview at {url} after 5 ms.\n" in run.out, run
    assert "preview=Fix%2FThe-Cart" in service.calls[1]
    assert "put the folder first: capsule deploy . --preview" in (await stubbed("deploy", "--preview", ".")).err


def deploy(state: str, log: str, **fields: Any) -> Script:
    return answer(200, {"id": "dep_1", "state": state, "log": log, **fields})


@pytest.mark.usefixtures("quick_follow")
async def test_a_log_grows(stubbed: Tool, service: Service) -> None:
    """Each request asks for the lines after those that are printed."""
    log = ["installing", "", "\x1b[31mred\x1b[0m end", "… 5,000 lines are missing here", "swapped"]
    service.replies = [
        deploy("queued", "", logLines=0),
        deploy("queued", "", logLines=0),
        deploy("building", f"{log[0]}\n", logLines=1),
        deploy("building", f"{log[1]}\n{log[2]}\n", logLines=3),
        answer(503, b"a proxy says the service restarts"),
        deploy("checking", "", logLines=3),
        deploy("canary", f"{log[3]}\n{log[4]}\n", logLines=5_004),
        deploy("live", "", logLines=5_004, url="https://shop.example.com", durationMs=61_000),
    ]
    run = await stubbed("deploys", "show", "dep_1", "--follow")
    printed = ["── queued", "── building", "installing", "", "red end", "── checking", *log[3:], "── canary"]
    assert run.out.splitlines() == [*printed, "Live at https://shop.example.com after 1 min 1 s."]
    asked = [call.partition("logAfter=")[2] for call in service.calls]
    assert asked == ["0", "0", "0", "1", "3", "3", "3", "5004"]


@pytest.mark.usefixtures("quick_follow")
async def test_following_has_an_end(stubbed: Tool, service: Service) -> None:
    service.replies = [deploy("queued", "")]
    run = await stubbed("deploys", "show", "dep_1", "--follow", "--timeout", "1")
    assert (run.code, run.out) == (1, "── queued\n")
    assert "dep_1 is still queued after 1 s" in run.err
    service.replies = [deploy("building", ""), answer(503, b"")]  # it stays away
    run = await stubbed("deploys", "show", "dep_1", "--follow")
    assert (run.code, "answered 503" in run.err) == (1, True)


async def test_a_log_in_a_terminal(stubbed: Tool, service: Service) -> None:
    log = f"\x1b[31mred\x1b[0m and \x1b[2Jplain\n{'https://example.com/' + 'x' * 200}\n"
    for environment, line in (({}, "\x1b[31mred\x1b[0m and [2Jplain"), ({"NO_COLOR": "1"}, "red and [2Jplain")):
        live = deploy("live", "", url="https://shop.example.com", durationMs=900)
        service.replies = [deploy("building", log, logLines=2), live]
        show = ("deploys", "show", "dep_1", "--follow")
        seen = await asyncio.to_thread(run_in_terminal, stubbed, *show, **environment)
        assert line in seen
        assert "\x1b[2J" not in seen
        assert "x" * 200 in seen
        assert "Live at https://shop.example.com after 900 ms." in seen
