"""The app that a command is about, from its argument or the nearest capsule.toml; and shell completion."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from capsule_gateway.cli.arguments import app_argument, find_app_name
from tests.capsule_gateway.cli.conftest import Service
from tests.support.command_line import Tool
from tests.support.redis_servers import free_port

NOTES = 'name = "notes"\n'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder: two below one with a manifest."""
    (tmp_path / "capsule.toml").write_text(NOTES)
    deep = tmp_path / "src" / "pages"
    deep.mkdir(parents=True)
    monkeypatch.chdir(deep)
    return deep


def test_the_nearest_manifest_up_to_the_root_of_the_repository(folder: Path) -> None:
    assert find_app_name() == "notes"
    (folder / "capsule.toml").write_text('name = "inner"\n[build]\ncommand = "make"\n')
    assert find_app_name() == "inner"
    (folder / "capsule.toml").write_text("[build]\n")
    assert find_app_name() is None
    (folder / "capsule.toml").unlink()
    (folder / ".git").mkdir()
    assert find_app_name() is None
    (folder.parents[1] / "capsule.toml").rename(folder / "capsule.toml")
    assert find_app_name() == "notes"


def run(*arguments: str, **options: object) -> str:
    """Returns what a command with APP and perhaps a second argument gets, or the error."""

    @click.command()
    @app_argument
    def one(app: str) -> None:
        click.echo(app)

    @click.command()
    @app_argument
    @click.argument("more", **options)
    def two(app: str, more: str | tuple[str, ...] | None) -> None:
        click.echo(f"{app} {more}")

    result = CliRunner().invoke(two if options else one, arguments)
    return (result.output if result.exit_code == 0 else result.output.splitlines()[-1]).strip()


@pytest.mark.usefixtures("folder")
def test_a_missing_app_is_that_of_the_folder() -> None:
    assert run() == "notes"
    assert run("shop") == "shop"
    assert run("shop", required=False) == "shop None"
    assert run("dep_1", required=False) == "notes dep_1"
    assert run("../site", default=".") == "notes ../site"
    assert run("shop", "../site", default=".") == "shop ../site"
    assert run("KEY", "OTHER", nargs=-1, required=True) == "notes ('KEY', 'OTHER')"
    assert run("shop", "KEY", nargs=-1, required=True) == "shop ('KEY',)"
    assert "'../site' is not the name of an app" in run("../site")


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.usefixtures("folder")
async def test_commands_in_the_folder_of_an_app(stubbed: Tool, service: Service) -> None:
    assert (await stubbed("env", "set", "LEVEL", given="3")).line.startswith("Set LEVEL for notes")
    await stubbed("env", "list")
    assert service.calls == ["PUT /account/apps/notes/env", "GET /account/apps/notes/env"]
    assert "Missing argument" in await stubbed.refused("apps", "remove", "--yes", code=2)  # must be named


async def complete_words(capsule: Tool, *words: str) -> list[str]:
    """Returns the values that bash gets. Each line of the output is a type and a value."""
    line = " ".join(["capsule", *words])
    asked = {"_CAPSULE_COMPLETE": "bash_complete", "COMP_WORDS": line, "COMP_CWORD": str(len(words))}
    run = await capsule(**asked)
    assert not run.err
    return [value.partition(",")[2] for value in run.out.splitlines() if value]


ROWS: dict[str, Any] = {
    "/account/apps": [{"name": "shop"}, {"name": "notes"}],
    "/account/hooks": [{"id": "hook_1"}],
    "/account/apps/shop/env": [{"name": "API_TOKEN"}, {"name": "API_URL"}, {"name": "OTHER"}],
    "/account/apps/shop/data": {"snapshots": [{"id": "snp_1"}, {"id": "snp_2"}], "state": "ok"},
    "/account/deliveries": [{"id": "evt_2"}, {"id": "evt_2"}, {"id": "evt_1"}],
    "/account/deploys": [{"id": "dep_1"}],
}


@pytest.fixture
def complete(stubbed: Tool, service: Service) -> Callable[[str], Awaitable[list[str]]]:
    service.answers = {f"GET {path}": rows for path, rows in ROWS.items()}
    return lambda words: complete_words(stubbed, *words.split())


@pytest.mark.asyncio(loop_scope="session")
async def test_completion_with_what_an_account_has(complete: Callable[[str], Awaitable[list[str]]]) -> None:
    for words, offered in (
        ("deploys publish sh", ["shop"]),
        ("hooks remove hook_", ["hook_1"]),
        ("new notes --template s", ["static"]),
        ("keys re", ["remove"]),
        ("env remove shop API_URL API_T", ["API_TOKEN"]),
        ("data restore shop snp", ["snp_1", "snp_2"]),
        ("deliveries show evt", ["evt_2", "evt_1"]),
        ("deploys cancel dep", ["dep_1"]),
    ):
        assert await complete(words) == offered, words


@pytest.mark.asyncio(loop_scope="session")
async def test_completion_without_a_service_or_a_key_or_with_an_answer_that_cannot_be_read(
    complete: Callable[[str], Awaitable[list[str]]], service: Service, tmp_path: Path
) -> None:
    """Rows may be missing, or be no rows: the line being typed is not disturbed."""
    unreadable: list[Any] = [{"snapshots": None}, {"snapshots": ["x"]}, {}, []]
    for found in unreadable:
        service.answers["GET /account/apps/shop/data"] = found
        assert await complete("data restore shop s") == [], found
    for url, key in ((f"http://127.0.0.1:{free_port()}", "csk_key"), (service.address, "")):
        assert await complete_words(Tool(url, key, tmp_path), "apps", "show", "s") == []


@pytest.mark.asyncio(loop_scope="session")
async def test_the_script_of_a_shell(offline: Tool) -> None:
    for shell in ("bash", "zsh", "fish"):
        script = (await offline("completion", shell)).out
        assert f"_CAPSULE_COMPLETE={shell}_complete" in script
        assert (await offline("completion", SHELL=f"/usr/bin/{shell}")).out == script
    for unknown in ("/bin/tcsh", None):
        said = await offline.refused("completion", code=2, SHELL=unknown)
        assert said == "name the shell: capsule completion bash|zsh|fish"
