"""`capsule deploys`: what was deployed, what is being deployed, and publishing a folder."""

from __future__ import annotations

import contextlib
import re
import time as clock
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from rich.status import Status
from rich.text import Text

from gateway.cli.account import limit
from gateway.cli.service import Refused, Service, path, service
from gateway.cli.show import (
    Row,
    as_json,
    clean,
    console,
    plain,
    show_fields,
    show_json,
    show_table,
    size,
    state,
    time,
    took,
    word,
)

POLL = 1.0  # seconds
FAULTS = 15  # polls in a row that may go unanswered
PATIENCE = 1800  # seconds
ENDED = ("live", "failed")
COLOUR = re.compile(r"\x1b\[[0-9;]*m")

following = click.option("--follow", is_flag=True, help="Print log and progress until the deploy ends.")
patience = click.option(
    "--timeout",
    "patience",
    default=PATIENCE,
    show_default=True,
    type=click.IntRange(1),
    help="Seconds to follow a deploy.",
)


@click.group()
def deploys() -> None:
    """Publish a folder; see what was built and is being built."""


@deploys.command("list")
@click.option("--app", help="Of this app only.")
@limit
@as_json
def deploys_list(app: str | None, limit: int, as_json: bool) -> None:
    """The latest deploys, newest first."""
    rows = service().rows("/account/deploys", app=app, limit=limit)
    if as_json:
        return show_json(rows)
    show_table(
        rows,
        {
            "id": plain("id"),
            "app": plain("app"),
            "state": state("state"),
            "kind": plain("kind"),
            "by": plain("trigger"),
            "commit": _commit,
            "queued": time("createdAt"),
            "took": took("durationMs"),
            "result": lambda row: plain("error")(row) or plain("url")(row),
        },
        prose="result",
        empty="No deploys yet. Publish a folder with: capsule deploys publish APP DIR",
    )


def _commit(row: Row) -> str:
    return plain("commit")(row)[:7]


@deploys.command("show")
@click.argument("deploy_id", metavar="ID")
@following
@patience
@as_json
def deploys_show(deploy_id: str, follow: bool, patience: int, as_json: bool) -> None:
    """A deploy and its log. With --follow, exit 1 when it fails."""
    if follow:
        return _follow(service(), deploy_id, patience, as_json)
    found = service().fields("GET", path("account", "deploys", deploy_id), having="state")
    if as_json:
        return show_json(found)
    show_fields(
        {
            "deploy": plain("id")(found),
            "app": plain("app")(found),
            "state": word(found.get("state")),
            "kind": plain("kind")(found),
            "by": plain("trigger")(found),
            "commit": plain("commit")(found),
            "queued": time("createdAt")(found),
            "took": took("durationMs")(found),
            "address": plain("url")(found),
            "error": plain("error")(found),
        }
    )
    lines = _lines(found)
    click.echo("\n" + "\n".join(lines) if lines else "\nNo log yet.")


@deploys.command("publish")
@click.argument("app")
@click.argument("folder", metavar="[DIR]", default=".", type=click.Path(exists=True, file_okay=False, path_type=Path))
@following
@patience
@as_json
def deploys_publish(app: str, folder: Path, follow: bool, patience: int, as_json: bool) -> None:
    """Deploy the source in DIR (here, when left out) as APP's live version.

    What .gitignore and .capsuleignore name stays at home, and so do .git, node_modules and .env in any case.
    """
    from gateway.cli.source import packed

    called = service()
    with _screen("packing") as screen, packed(folder) as source:
        screen.working(f"uploading {size(source.size)}")
        queued = called.upload(path("account", "apps", app, "source"), source.parts(), source.size)
    deploy_id = str(queued["deployId"])
    if as_json and not follow:
        return show_json(queued)
    if not as_json:
        count = f"{source.files} file{'s' if source.files > 1 else ''}"
        click.echo(f"Published {count}, {size(source.size)} packed, as {deploy_id}.")
    if follow:
        return _follow(called, deploy_id, patience, as_json)
    click.echo(f"Follow it with: capsule deploys show {deploy_id} --follow")


# -- following -----------------------------------------------------------------------------------------------


class Screen:
    """Lines, and below them a spinner with a word where somebody looks."""

    def __init__(self, status: Status | None) -> None:
        self._status = status

    def line(self, text: str) -> None:
        if self._status is None:
            click.echo(text)
        else:
            self._status.console.print(Text.from_ansi(text), soft_wrap=True)

    def working(self, word: str) -> None:
        if self._status is not None:
            self._status.update(word)


@contextlib.contextmanager
def _screen(word: str) -> Iterator[Screen]:
    there = console()
    if not there.is_terminal:
        yield Screen(None)
        return
    with there.status(word) as status:
        yield Screen(status)


def _follow(service: Service, deploy_id: str, patience: int, as_json: bool) -> None:
    """Prints what is new at every look. Raises Refused when the deploy failed, or is not over in `patience` seconds."""
    with _screen("queued") as screen:
        deploy = _ended(service, deploy_id, patience, None if as_json else screen)
    if as_json:
        show_json(deploy)
    if deploy["state"] == "failed":
        raise Refused(f"{deploy_id} failed: {plain('error')(deploy) or 'no reason is known'}")
    if not as_json:
        click.echo(f"Live at {plain('url')(deploy)} after {took('durationMs')(deploy)}.")


def _ended(service: Service, deploy_id: str, patience: int, screen: Screen | None) -> dict[str, Any]:
    before, printed, began = "", 0, clock.monotonic()
    while True:
        deploy = _look(service, deploy_id)
        state, waited = clean(str(deploy["state"])), clock.monotonic() - began
        if screen is not None:
            screen.working(f"{state}, {waited:.0f} s")
            printed = _tell(screen, deploy, state if state not in (before, *ENDED) else None, printed)
        if state in ENDED:
            return deploy
        if waited > patience:
            again = f"capsule deploys show {deploy_id} --follow"
            raise Refused(f"{deploy_id} is still {state} after {patience} s; go on with: {again}")
        before = state
        clock.sleep(POLL)


def _tell(screen: Screen, deploy: Row, begun: str | None, printed: int) -> int:
    """The lines that are new, and the state that has begun; how many lines are printed now."""
    lines = _lines(deploy)
    # A line that is still being written is printed when it is whole.
    ended = deploy["state"] in ENDED or plain("log")(deploy).endswith("\n")
    whole = len(lines) if ended else max(printed, len(lines) - 1)
    new = lines[printed:whole]
    if begun is not None:
        # All that is logged is of the build, or of what comes after it.
        new.insert(0 if begun == "building" else len(new), f"── {begun}")
    for line in new:
        screen.line(line)
    return max(printed, whole)


def _look(service: Service, deploy_id: str) -> dict[str, Any]:
    """A service that restarts, or a network that falters, does not end the following."""
    for _ in range(FAULTS):
        try:
            return service.fields("GET", path("account", "deploys", deploy_id), having="state")
        except Refused as refused:
            if not refused.passing:
                raise
            clock.sleep(POLL)
    return service.fields("GET", path("account", "deploys", deploy_id), having="state")


def _lines(deploy: Row) -> list[str]:
    """The log as a terminal would show it, with its colours where there are any, and nothing else it would obey."""
    coloured = console().color_system is not None
    shown = []
    for line in plain("log")(deploy).split("\n"):
        line = line.rstrip("\r").rpartition("\r")[2]  # a progress line overwrites itself
        codes = COLOUR.findall(line)
        if coloured and codes:
            parts = zip(COLOUR.split(line), [*codes, "\x1b[0m"], strict=True)
            shown.append("".join(clean(part) + code for part, code in parts))
        else:
            shown.append(clean(COLOUR.sub("", line)))
    while shown and not shown[-1]:
        shown.pop()
    return shown
