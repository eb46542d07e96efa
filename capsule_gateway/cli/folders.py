"""`capsule new`, `deploy` and `open`: write the folder of an app, publish it as its manifest says, open its page."""

from __future__ import annotations

import json
import secrets
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from capsule_gateway.cli.arguments import (
    MANIFEST,
    complete_app,
    find_app_name,
    folder_argument,
    message_option,
    timeout_option,
)
from capsule_gateway.cli.cells import strip_controls, text_of
from capsule_gateway.cli.deploys import publish_source
from capsule_gateway.cli.manifest import ensure_manifest
from capsule_gateway.cli.service import Service, ServiceRefusal, WrongUsage, call_if_permitted, open_service, path
from capsule_gateway.cli.show import as_json, print_note, show_line, wants_json
from gateway.deploys.templates import TEMPLATES, list_template_files

if TYPE_CHECKING:
    from gateway.deploys.manifest import Manifest

PLACEHOLDER = b"__NAME__"
AUTH_SECRET = "BETTER_AUTH_SECRET"  # noqa: S105 - the variable in which better-auth expects the secret of its sessions

# The templates: files and folders in `capsule`, and the folder of the app that they are copied to. `template/shared` is
# what both use. Each app has a copy of the browser module in `capsule/lib`, which the templates do not contain.
PARTS: dict[str, list[tuple[str, str]]] = {
    "full": [
        ("template/full", "."),
        ("template/shared/markdown.js", "src"),
        ("template/shared/words.js", "src"),
        ("template/shared/tokens.css", "src"),
        ("template/shared/capsule.svg", "public"),
        ("package.json", "vendor/capsule-ai"),
        ("README.md", "vendor/capsule-ai"),
        ("lib", "vendor/capsule-ai/lib"),
    ],
    "static": [("template/static", "."), ("template/shared", "site"), ("lib", "site/lib")],
}


@click.command()
@click.argument("name")
@click.argument("folder", metavar="[DIR]", required=False, type=click.Path(file_okay=False, path_type=Path))
@click.option(
    "--template",
    "kind",
    type=click.Choice(["full", "static"]),
    default="full",
    show_default=True,
    help="full: pages, a backend with sign-in, and stored data. static: pages only.",
)
def new(name: str, folder: Path | None, kind: Literal["full", "static"]) -> None:
    """Write a new app called NAME into DIR, by default ./NAME. Needs no network.

    The app works as it is. NAME becomes the first part of its address.
    """
    from gateway.accounts.records import PREVIEW, SLUG

    if not SLUG.fullmatch(name) or PREVIEW.fullmatch(name):
        raise WrongUsage(
            f"{name!r} is not a name for an app: use up to 63 lower-case letters, digits and single hyphens, "
            "without '-preview' at the end"
        )
    folder = folder or Path(name)
    if folder.exists() and any(folder.iterdir()):
        raise ServiceRefusal(f"{folder} is not empty; choose another folder: capsule new {name} DIR")
    write_template(name, kind, folder)
    click.echo(strip_controls(f"Wrote the app {name} into the folder {folder}."))
    click.echo("\nNext steps:\n")
    for command, purpose in _list_next_steps(folder):
        click.echo(f"  {command:<24}  # {purpose}")


def write_template(name: str, kind: Literal["full", "static"], folder: Path) -> None:
    """Writes the files of an app called `name` into the folder, which is created if needed. Raises OSError."""
    for source, target in PARTS[kind]:
        for file, relative in _find_files(TEMPLATES / source):
            copy = folder / target / relative
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(file.read_bytes().replace(PLACEHOLDER, name.encode()))


def _find_files(top: Path) -> list[tuple[Path, Path]]:
    """Returns each file in `top` with its path there, or `top` itself if it is a file."""
    if top.is_file():
        return [(top, Path(top.name))]
    return [(file, file.relative_to(top)) for file in list_template_files(top)]


def _list_next_steps(folder: Path) -> list[tuple[str, str]]:
    """Returns commands, each with its purpose."""
    return [
        (f"cd {shlex.quote(str(folder))}", f"README.md and {MANIFEST} explain the folder"),
        ("capsule login", "once"),
        ("capsule deploy", "publish it, and print its address"),
        ("capsule dev .", "run it on this machine while you change it"),
    ]


@click.command()
@folder_argument
@click.option("--yes", is_flag=True, help="Do not ask before writing a capsule.toml.")
@click.option("--no-cache", is_flag=True, help="Download all packages again.")
@click.option(
    "--preview",
    metavar="[BRANCH]",
    is_flag=False,
    flag_value="",
    help="Publish a preview of BRANCH, by default git's; the live version stays. DIR comes before this option.",
)
@message_option
@timeout_option
@as_json
def deploy(folder: Path, yes: bool, no_cache: bool, preview: str | None, message: str | None, timeout: int) -> None:
    """Publish the app in DIR, by default the current folder, and print its address.

    capsule.toml in DIR names the app. If there is none, the command writes it as 'capsule init' does; on a terminal, it
    asks first. It creates the app if your account has none of this name, and follows the deploy to its end. The upload
    omits the same files as 'capsule deploys publish'.
    """
    if preview is not None and preview.startswith((".", "/")):
        raise WrongUsage(f"{preview!r} is not a branch; put the folder first: capsule deploy {preview} --preview")
    ensure_manifest(folder, ask=not yes)
    name = read_manifest(folder).name
    if not name:
        raise WrongUsage(f'{folder / MANIFEST} has no name; begin it with a line such as: name = "my-app"')
    service = open_service()
    _create_missing_app(service, name)
    if _uses_better_auth(folder):
        _set_missing_secret(service, name)
    if no_cache:
        service.send("POST", path("account", "apps", name, "build-cache", "clear"))
    publish_source(name, folder, preview, message, True, timeout)


def read_manifest(folder: Path) -> Manifest:
    """Reads the folder's manifest. Raises WrongUsage."""
    from gateway.deploys.manifest import ManifestError, parse_manifest

    try:
        return parse_manifest((folder / MANIFEST).read_bytes())
    except FileNotFoundError:
        raise WrongUsage(f"{folder / MANIFEST} does not exist; write it with: capsule init {folder}") from None
    except ManifestError as error:
        raise WrongUsage(str(error)) from None


def _create_missing_app(service: Service, name: str) -> None:
    listed = call_if_permitted(lambda: service.list_rows("/account/apps"))
    # A key for deploys only does not list apps: then the app must be there.
    if listed is None or any(app.get("name") == name for app in listed):
        return
    try:
        service.send("POST", "/account/apps", {"name": name})
    except ServiceRefusal as refused:
        if refused.status == 409:
            raise ServiceRefusal(f"the name {name} is taken; choose another name in {MANIFEST}", status=409) from None
        raise
    _note(f"Created the app {name}.")


def _uses_better_auth(folder: Path) -> bool:
    try:
        package = json.loads((folder / "package.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    needed = package.get("dependencies") if isinstance(package, dict) else None
    return isinstance(needed, dict) and "better-auth" in needed


def _set_missing_secret(service: Service, name: str) -> None:
    """Sets the secret with which better-auth signs its sessions, unless the app has one."""
    variables = path("account", "apps", name, "env")
    listed = call_if_permitted(lambda: service.list_rows(variables))
    if listed is None or any(row.get("name") == AUTH_SECRET for row in listed):
        return
    service.send("PUT", variables, {AUTH_SECRET: secrets.token_urlsafe(32)})
    _note(f"Set its variable {AUTH_SECRET} to a new secret.")


def _note(sentence: str) -> None:
    if not wants_json():
        print_note(strip_controls(sentence))


@click.command("open")
@click.argument("app", required=False, shell_complete=complete_app)
@click.option("--dashboard", is_flag=True, help="Open the page of the app in the dashboard instead.")
@as_json
def open_app(app: str | None, dashboard: bool) -> None:
    """Open APP in the browser, and print its address.

    Without APP, it is the app in capsule.toml of the working folder; if there is none, the command opens the dashboard.
    """
    service, name = open_service(), app or find_app_name()
    if name is None:
        address = f"{service.url}/dashboard"
    else:
        record = service.request_object("GET", path("account", "apps", name), having="url")
        address = f"{service.url}/dashboard#/apps{path(name)}" if dashboard else text_of("url")(record)
    address = strip_controls(address)
    show_line({"url": address}, address)
    if not _open_browser(address):
        print_note("No browser opened. Open the address yourself.")


def _open_browser(address: str) -> bool:
    import webbrowser

    try:
        return address.startswith(("https://", "http://")) and webbrowser.open(address)
    except webbrowser.Error:
        return False
