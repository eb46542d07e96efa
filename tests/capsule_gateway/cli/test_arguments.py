"""The app that a command is about: its argument, or the name in the nearest capsule.toml."""

from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from capsule_gateway.cli.arguments import app_argument, find_app_name
from capsule_gateway.cli.service import WrongUsage
from tests.capsule_gateway.cli.conftest import Service
from tests.support.command_line import Tool

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


@pytest.mark.parametrize("text", ["name = ", "name = " + "[" * 10_000, "name = " + "9" * 5_000, "\udcff"])
def test_a_damaged_manifest(folder: Path, text: str) -> None:
    (folder / "capsule.toml").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(WrongUsage, match=r"capsule\.toml cannot be read"):
        find_app_name()


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
    assert run(required=False) == "notes None"
    assert run("shop", required=False) == "shop None"
    assert run("dep_1", required=False) == "notes dep_1"
    assert run("../site", default=".") == "notes ../site"
    assert run("shop", "../site", default=".") == "shop ../site"
    assert run("shop.example", required=True) == "notes shop.example"
    assert run("snp1", required=True) == "notes snp1"
    assert run("KEY", "OTHER", nargs=-1, required=True) == "notes ('KEY', 'OTHER')"
    assert run("shop", "KEY", nargs=-1, required=True) == "shop ('KEY',)"
    for arguments, options in ((("../site",), {}), (("My Notes", "x"), {"required": True})):
        assert f"{arguments[0]!r} is not the name of an app" in run(*arguments, **options)


def test_without_a_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".git").mkdir()
    monkeypatch.chdir(tmp_path)
    assert "Missing argument 'APP'" in run()
    assert "capsule.toml" in run()
    assert "Missing argument 'MORE'" in run("shop", required=True)
    assert "'../site' is not the name of an app" in run("../site", default=".")


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.usefixtures("folder")
async def test_commands_in_the_folder_of_an_app(stubbed: Tool, service: Service) -> None:
    assert (await stubbed("env", "set", "LEVEL", given="3")).line.startswith("Set LEVEL for notes")
    await stubbed("env", "list")
    assert service.calls == ["PUT /account/apps/notes/env", "GET /account/apps/notes/env"]
    assert "Missing argument" in await stubbed.refused("apps", "remove", "--yes", code=2)  # must be named
