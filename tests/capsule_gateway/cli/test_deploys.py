"""`capsule deploys`: publishing to a running gateway, and following a deploy while the test plays the engine."""

import asyncio
import re
import subprocess
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.server import Exchange, FakeServer, Script, answer
from tests.support.accounts import App
from tests.support.command_line import Run, Tool, run_in_terminal
from tests.support.deploys import report_phases
from tests.support.polling import wait_until

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.fixture
def capsule(hosted: App, tmp_path: Path) -> Tool:
    return Tool(hosted.gateway.address, hosted.account.key, tmp_path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "shop"
    folder.mkdir()
    (folder / "index.html").write_text("<h1>Shop</h1>")
    (folder / ".env").write_text("SECRET=1")
    return folder


async def test_publish(capsule: Tool, hosted: App, folder: Path) -> None:
    sources = Path(hosted.gateway.environment["GATEWAY_DATA_DIR"]) / "sources"
    before = {*sources.glob("*/*.tar.gz")}
    run = await capsule("deploys", "publish", hosted.name, str(folder))
    published = re.fullmatch(
        r"Published 1 file \(\d+ bytes packed, 1 left out\) as (dep_\w+)\.\n"
        rf"Details: {hosted.gateway.address}/dashboard#/deploys/\1\n"
        r"Follow it with: capsule deploys show \1 --follow\n",
        run.out,
    )
    assert published, run
    (stored,) = {*sources.glob("*/*.tar.gz")} - before
    with tarfile.open(stored) as tar:
        assert tar.getnames() == ["index.html"]

    shown = (await capsule("deploys", "show", published[1])).out
    assert published[1] in shown
    assert shown.endswith("\n\nNo log yet.\n")


async def test_publish_a_page_and_a_zip(capsule: Tool, hosted: App, folder: Path) -> None:
    sources = Path(hosted.gateway.environment["GATEWAY_DATA_DIR"]) / "sources"
    page, archive, other = folder / "index.html", folder / "Shop.ZIP", folder / "shop.rar"
    with zipfile.ZipFile(archive, "w") as made:
        made.write(page, "index.html")
    other.touch()
    for file in (page, archive):
        before = {*sources.glob("*/*.tar.gz")}
        assert "Published 1 file" in (await capsule("deploys", "publish", hosted.name, str(file))).out
        (stored,) = {*sources.glob("*/*.tar.gz")} - before
        with tarfile.open(stored) as tar:
            assert tar.extractfile("index.html").read() == page.read_bytes()  # type: ignore[union-attr]
    refusal = await capsule.refused("deploys", "publish", hosted.name, str(other))
    assert "shop.rar can't be published; name a folder, an .html page, or a .zip or .tar.gz archive" in refusal


async def test_publish_refused(capsule: Tool, hosted: App, folder: Path) -> None:
    assert "NOT_FOUND" in await capsule.refused("deploys", "publish", "somebody-elses", str(folder))
    (folder / "index.html").unlink()
    assert "nothing to publish" in await capsule.refused("deploys", "publish", hosted.name, str(folder))


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


async def test_rows_say_what_was_deployed_and_by_whom(capsule: Tool, hosted: App, folder: Path, checkout: str) -> None:
    async def publish(*more: str) -> dict[str, Any]:
        queued = (await capsule("deploys", "publish", hosted.name, str(folder), *more, "--json")).json
        shown: dict[str, Any] = (await capsule("deploys", "show", queued["deployId"], "--json")).json
        return {name: shown.get(name) for name in ("by", "message", "commit", "branch", "dirty", "kind")}

    message = "Count the [31mitems"
    described = {"by": "first", "message": message, "commit": checkout, "branch": "Fix/The-Cart", "kind": "live"}
    git(folder, "status")
    (folder / ".env").unlink()
    assert await publish() == {**described, "dirty": False}
    (folder / "new.html").touch()
    assert await publish("-m", "Try it") == {**described, "message": "Try it", "dirty": True}
    assert await publish("--preview", "other") == {**described, "branch": "other", "dirty": True, "kind": "preview"}


async def test_a_folder_without_a_commit(capsule: Tool, hosted: App, folder: Path) -> None:
    git(folder, "init", "-q", "-b", "main")
    deploy_id = (await capsule("deploys", "publish", hosted.name, str(folder), "--json")).json["deployId"]
    shown = (await capsule("deploys", "show", deploy_id, "--json")).json
    assert not {"message", "commit", "branch", "dirty"} & shown.keys()


@pytest.mark.usefixtures("quick_follow", "checkout")
async def test_a_preview(capsule: Tool, hosted: App, folder: Path) -> None:
    (folder / "capsule.toml").write_text(f'name = "{hosted.name}"\n[build]\noutput = "."\n')
    following = asyncio.create_task(capsule("deploy", str(folder), "--preview"))
    await report_phases(hosted.gateway, await find_queued(hosted), "build", "health")
    run = await asyncio.wait_for(following, 10)
    url = f"https://{hosted.name}--p-fix-the-cart.apps.localhost"
    assert re.search(rf"^Preview at {re.escape(url)} after [\d.]+ (ms|s)\.$", run.out, re.MULTILINE), run
    assert "put the folder first: capsule deploy . --preview" in (await capsule("deploy", "--preview", ".")).err


async def find_queued(app: App) -> str:
    """Returns the id of the queued deploy."""

    async def queued() -> list[dict[str, Any]]:
        response = await app.gateway.platform("GET", "deploys?state=queued")
        return [deploy for deploy in response.json() if deploy["app"] == app.name]

    (deploy,) = await wait_until(queued)
    return deploy["id"]


class Slow(FakeServer):
    """A service that answers with the given states of a deploy, one after another."""

    def __init__(self, *answers: Script) -> None:
        super().__init__()
        self.answers = list(answers)

    def script(self, exchange: Exchange) -> Script:
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


def deploy(state: str, log: str, **fields: Any) -> Script:
    return answer(200, {"id": "dep_1", "state": state, "log": log, **fields})


async def follow(tmp_path: Path, *answers: Script, options: tuple[str, ...] = ()) -> Run:
    async with Slow(*answers) as service:
        return await Tool(service.address, "csk_key", tmp_path)("deploys", "show", "dep_1", "--follow", *options)


@pytest.mark.usefixtures("quick_follow")
async def test_a_log_grows(tmp_path: Path) -> None:
    """Each request asks for the lines after those that are printed."""
    log = ["installing", "", "\x1b[31mred\x1b[0m end", "… 5,000 lines are missing here", "swapped"]
    answers = [
        deploy("queued", "", logLines=0),
        deploy("queued", "", logLines=0),
        deploy("building", f"{log[0]}\n", logLines=1),
        deploy("building", f"{log[1]}\n{log[2]}\n", logLines=3),
        answer(503, b"a proxy says the service restarts"),
        deploy("checking", "", logLines=3),
        deploy("canary", f"{log[3]}\n{log[4]}\n", logLines=5_004),
        deploy("live", "", logLines=5_004, url="https://shop.example.com", durationMs=61_000),
    ]
    async with Slow(*answers) as service:
        run = await Tool(service.address, "csk_key", tmp_path)("deploys", "show", "dep_1", "--follow")
        asked = [exchange.path.partition("logAfter=")[2] for exchange in service.exchanges]
    assert run.out.splitlines() == [
        "── queued",
        "── building",
        "installing",
        "",
        "red end",
        "── checking",
        "… 5,000 lines are missing here",
        "swapped",
        "── canary",
        "Live at https://shop.example.com after 1 min 1 s.",
    ]
    assert asked == ["0", "0", "0", "1", "3", "3", "3", "5004"]


@pytest.mark.usefixtures("quick_follow")
async def test_following_has_an_end(tmp_path: Path) -> None:
    run = await follow(tmp_path, deploy("queued", ""), options=("--timeout", "1"))
    assert (run.code, run.out) == (1, "── queued\n")
    assert "dep_1 is still queued after 1 s" in run.err


@pytest.mark.usefixtures("quick_follow")
async def test_a_service_that_stays_away(tmp_path: Path) -> None:
    run = await follow(tmp_path, deploy("building", ""), answer(503, b""))
    assert run.code == 1
    assert "answered 503" in run.err


@pytest.mark.parametrize(("environment", "colored"), [({}, True), ({"NO_COLOR": "1"}, False)])
async def test_a_log_in_a_terminal(tmp_path: Path, environment: dict[str, str], colored: bool) -> None:
    log = f"\x1b[31mred\x1b[0m and \x1b[2Jplain\n{'https://example.com/' + 'x' * 200}\n"
    async with Slow(
        deploy("building", log, logLines=2), deploy("live", "", url="https://shop.example.com", durationMs=900)
    ) as service:
        capsule = Tool(service.address, "csk_key", tmp_path)
        seen = await asyncio.to_thread(run_in_terminal, capsule, "deploys", "show", "dep_1", "--follow", **environment)
    assert ("\x1b[31mred\x1b[0m and [2Jplain" in seen) is colored
    assert ("red and [2Jplain" in seen) is not colored
    assert "\x1b[2J" not in seen
    assert "x" * 200 in seen
    assert "Live at https://shop.example.com after 900 ms." in seen
