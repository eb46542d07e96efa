"""`capsule init`: recognizes what is in a folder, and writes its manifest. `capsule deploy` does the same first."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from capsule_gateway.cli.arguments import MANIFEST, folder_argument
from capsule_gateway.cli.cells import strip_controls
from capsule_gateway.cli.service import ServiceRefusal, WrongUsage
from capsule_gateway.cli.show import as_json, print_note, show_json, wants_json

if TYPE_CHECKING:
    from gateway.deploys.recognition import Recognition

DEFAULT_NAME = "app"  # for a folder with a name of which nothing can be used


@click.command()
@folder_argument
@as_json
def init(folder: Path) -> None:
    """Write a capsule.toml for the app in DIR, by default the current folder.

    The command recognizes frameworks by the files in DIR. A folder without a known one is served as it is. With --json,
    it prints the settings and writes nothing.
    """
    if (folder / MANIFEST).exists():
        raise ServiceRefusal(f"{folder / MANIFEST} exists already")
    found = _recognize_folder(folder)
    if wants_json():
        return show_json({"found": found.rule, "name": found.name, "build": _list_settings(found)})
    _write_manifest(folder, found)
    click.echo(_describe_manifest(found))


def ensure_manifest(folder: Path, *, ask: bool) -> None:
    """Writes the folder's manifest if there is none, and says so. On a terminal, asks first if wanted.

    Raises ServiceRefusal for a project that lacks something, WrongUsage if there is nothing to publish, and Abort.
    """
    if (folder / MANIFEST).exists():
        return
    from gateway.deploys.recognition import explain_missing_page

    found = _recognize_folder(folder)
    if not found.file and (fault := explain_missing_page(folder)):
        raise WrongUsage(f"{folder}: no framework was recognized. {fault}")
    if ask and sys.stdin.isatty() and not wants_json():
        question = f"Found {found.rule}. Write {MANIFEST} ({found.summarize()}), and deploy it as {found.name}?"
        click.confirm(strip_controls(question), default=True, abort=True, err=True)
    _write_manifest(folder, found)
    if not wants_json():
        print_note(_describe_manifest(found))


def _recognize_folder(folder: Path) -> Recognition:
    """Returns what is in the folder, with a name for the app. Raises ServiceRefusal."""
    from gateway.deploys.recognition import SourceFolder, Unrecognizable, make_label, recognize

    try:
        found = recognize(SourceFolder(folder))
    except Unrecognizable as error:
        raise ServiceRefusal(str(error)) from None
    return found._replace(name=found.name or make_label(folder.resolve().name) or DEFAULT_NAME)


def _list_settings(found: Recognition) -> dict[str, str]:
    """Returns the table `build` of the manifest."""
    command = {"command": found.build.command} if found.build.command else {}
    return {**command, **({"start": found.build.start} if found.build.start else {"output": found.build.output})}


def _write_manifest(folder: Path, found: Recognition) -> None:
    lines = [f"name = {_quote(found.name)}", "", "[build]"]
    lines += [f"{key} = {_quote(value)}" for key, value in _list_settings(found).items()]
    with (folder / MANIFEST).open("x", encoding="utf-8") as file:
        file.write("\n".join([*lines, ""]))


def _quote(text: str) -> str:
    """Returns the text as a string of TOML, which has the escape sequences of JSON."""
    return json.dumps(text, ensure_ascii=False)


def _describe_manifest(found: Recognition) -> str:
    return strip_controls(f"Found {found.rule}. Wrote {MANIFEST}: {found.summarize()}.")
