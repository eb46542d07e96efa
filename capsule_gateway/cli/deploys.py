"""`capsule deploys`: publishes a folder; lists, follows, cancels, promotes and rolls back deploys."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from capsule_gateway.cli.arguments import (
    app_argument,
    deploy_argument,
    follow_option,
    limit,
    message_option,
    timeout_option,
)
from capsule_gateway.cli.cells import Row, age_of, duration_of, format_size, state_of, strip_controls, text_of, texts
from capsule_gateway.cli.commands import Answer, Group, done, sentence
from capsule_gateway.cli.service import Service, ServiceRefusal, call_if_permitted, open_service, path, retry
from capsule_gateway.cli.show import (
    as_json,
    as_list,
    console,
    print_next_page,
    print_note,
    show_fields,
    show_json,
    show_table,
    wants_json,
)

if TYPE_CHECKING:
    from rich.status import Status

POLL_SECONDS = 1.0  # between two requests while following
FINAL_STATES = ("live", "failed", "canceled")
NO_DEPLOYS = "No deploys yet. Publish a folder with: capsule deploys publish APP DIR"
COLOR = re.compile(r"\x1b\[[0-9;]*m")


deploys = Group("deploys", help="Publish, list, follow, cancel and roll back deploys.")


@deploys.command("list")
@click.option("--app", metavar="APP", help="List only the deploys of this app.")
@limit
@click.option("--before", metavar="ID", help="List only deploys older than this one (the next page).")
@as_list
def deploys_list(app: str | None, limit: int, before: str | None) -> None:
    """List deploys, newest first."""
    service = open_service()
    rows = service.list_rows("/account/deploys", app=app, limit=limit, before=before)
    if app and not rows:
        _require_app(service, app)
    show_table(
        rows,
        {
            **texts("id", "app"),
            "state": state_of("state"),
            "now": lambda row: "current" if row.get("current") else "",
            "kind": _name_kind,
            **texts("trigger", "by"),
            "commit": _format_commit,
            **texts("message"),
            "queued": age_of("createdAt"),
            "took": duration_of("durationMs"),
            "result": lambda row: text_of("error")(row) or text_of("url")(row) or _describe_wait(row),
        },
        prose="result",
        cut=["app", "by", "message"],
        less=["trigger", "commit", "by", "took", "message", "kind", "result"],
        empty="No older deploys." if before else NO_DEPLOYS,
    )
    print_next_page(rows, limit, "id")


def _require_app(service: Service, name: str) -> None:
    listed = call_if_permitted(lambda: service.list_rows("/account/apps"))
    if listed is None:
        return  # a key for deploys, which does not list apps
    names = [text_of("name")(app) for app in listed]
    if name not in names:
        yours = f"; yours are {', '.join(names)}" if names else ""
        raise ServiceRefusal(f"you have no app called {strip_controls(name)}{yours}")


def _name_kind(deploy: Row) -> str:
    """Returns `preview`, or nothing: most deploys are for the live address, and `live` is a state."""
    return "preview" if deploy.get("kind") == "preview" else ""


def _format_commit(deploy: Row) -> str:
    """Returns the branch and the short commit, with a * if the source has changes that are not in it."""
    commit = text_of("commit")(deploy)[:7] + ("*" if deploy.get("dirty") else "")
    return f"{text_of('branch')(deploy)} {commit}".strip()


def _describe_wait(row: Row) -> str:
    """Returns the queue position of a deploy and the reason why it waits."""
    reason, position = text_of("waitsFor")(row), text_of("position")(row)
    prefix = f"position {position}, " if position else ""
    return f"{prefix}waits for {reason}" if reason else ""


@deploys.command("show")
@deploy_argument
@follow_option
@timeout_option
@as_json
def deploys_show(deploy_id: str, follow: bool, timeout: int) -> None:
    """Show a deploy and its log. With --follow, exit with 1 if it fails."""
    if follow:
        return _follow_deploy(deploy_id, timeout)
    deploy = open_service().request_object("GET", path("account", "deploys", deploy_id), having="state")
    if wants_json():
        return show_json(deploy)
    show_fields(
        deploy,
        {
            **texts(deploy="id", app="app"),
            "state": state_of("state"),
            "current": "yes, its address serves it" if deploy.get("current") else "",
            "kind": _name_kind,
            **texts("trigger", "by", "message", "branch", "commit"),
            "changes": "not all are in the commit" if deploy.get("dirty") else "",
            **texts("release"),
            "queued": age_of("createdAt"),
            **texts(position="position", waits_for="waitsFor"),
            "took": duration_of("durationMs"),
            "phases": _format_phases,
            **texts(address="url", warning="warning", error="error"),
            "served": _describe_served,
            "next": _describe_next_step,
        },
    )
    lines = _log_lines(deploy)
    click.echo("\n" + "\n".join(lines) if lines else "\nNo log yet.")


def _describe_served(deploy: Row) -> str:
    """Returns what the address serves after a deploy that has failed or was canceled."""
    if deploy.get("state") not in ("failed", "canceled"):
        return ""
    served = text_of("stillServed")(deploy)
    return f"{served}, as before" if served else "nothing yet"


def _describe_next_step(deploy: Row) -> str:
    step = deploy.get("nextStep")
    if not isinstance(step, dict):
        return ""
    command = text_of("command")(step)
    return text_of("text")(step) + (f" {command}" if command else "")


def _format_phases(deploy: Row) -> str:
    """Returns the phases that have ended, with their durations."""
    phases = deploy.get("phases")
    ended = [phase for phase in phases if phase.get("durationMs") is not None] if isinstance(phases, list) else []
    return ", ".join(f"{text_of('phase')(phase)} {duration_of('durationMs')(phase)}" for phase in ended)


@deploys.command("publish")
@app_argument
@click.argument("source", metavar="[DIR|FILE]", default=".", type=click.Path(exists=True, path_type=Path))
@click.option("--preview", metavar="BRANCH", help="Publish a preview of this branch; the live version stays.")
@message_option
@follow_option
@timeout_option
@as_json
def deploys_publish(
    app: str, source: Path, preview: str | None, message: str | None, follow: bool, timeout: int
) -> None:
    """Deploy a folder, a page (.html), a .zip or a .tar.gz as APP's live version.

    DIR defaults to the current folder. The upload omits files that .gitignore or .capsuleignore exclude. It always
    omits .git, node_modules, virtual environments, caches, and files of secrets such as .env.
    """
    publish_source(app, source, preview, message, follow, timeout)


def publish_source(
    app: str, folder_or_file: Path, preview: str | None, message: str | None, follow: bool, timeout: int
) -> None:
    """Packs, uploads and, with `follow`, follows the deploy of a source. Raises ServiceRefusal if that fails.

    `preview` is the branch of a preview; '' stands for that of the source, or `preview` if it has none.
    """
    from capsule_gateway.cli.repository import read_checkout
    from capsule_gateway.cli.source import open_source

    checkout = read_checkout(folder_or_file if folder_or_file.is_dir() else folder_or_file.absolute().parent)
    if preview == "":
        preview = checkout.branch or "preview"
    described = {
        "preview": preview,
        "message": message or checkout.message or None,
        "commit": checkout.commit or None,
        "branch": checkout.branch or None,
        "dirty": checkout.dirty if checkout.commit else None,
    }
    with _open_screen("packing") as screen, open_source(folder_or_file) as source:
        chunks = _report_progress(source.read_chunks(), source.size, screen)
        address = path("account", "apps", app, "source")
        queued = open_service().upload_source(address, chunks, source.size, source.media_type, described)
    count = f"{source.files:,} file{'s' if source.files > 1 else ''}"
    omitted = f", {source.omitted:,} left out" if source.omitted else ""
    _show_queued(queued, f"Published {count} ({format_size(source.size)} packed{omitted})", follow, timeout)


def _report_progress(chunks: Iterator[bytes], size: int, screen: Screen) -> Iterator[bytes]:
    sent = 0
    for chunk in chunks:
        yield chunk
        sent += len(chunk)
        screen.set_status(f"uploading, {format_size(sent)} of {format_size(size)}")


def _show_queued(queued: Row, done: str, follow: bool, timeout: int) -> None:
    """Prints `done` with the deploy's id, and follows the deploy or prints how to follow it."""
    if wants_json() and not follow:
        return show_json(queued)
    deploy_id = strip_controls(str(queued["deployId"]))
    if not wants_json():
        click.echo(f"Details: {strip_controls(open_service().url)}/dashboard#/deploys/{deploy_id}")
        click.echo(f"{done} as {deploy_id}.")
    if follow:
        return _follow_deploy(deploy_id, timeout)
    click.echo(f"Follow it with: capsule deploys show {deploy_id} --follow")


QUEUED = Answer("deployId", lambda answer, follow, timeout, **_: _show_queued(answer, "Queued", follow, timeout))

deploys.sends(
    "rollback APP [DEPLOY] --follow --timeout",
    "POST /account/apps/{app}/rollback deployId=deploy_id",
    "Serve an earlier release of APP again, without a new build.\n\n"
    "The release is that of deploy ID or, by default, the one before the live release.",
    QUEUED,
)
deploys.sends(
    "promote DEPLOY --follow --timeout",
    "POST /account/deploys/{deploy_id}/promote",
    "Make the release of preview ID live, without a new build.",
    QUEUED,
)
deploys.sends(
    "redeploy DEPLOY --follow --timeout",
    "POST /account/deploys/{deploy_id}/redeploy",
    "Build the source of deploy ID again.\n\nFor a repository, this is the latest commit of the branch.",
    QUEUED,
)
deploys.sends(
    "preview APP BRANCH --follow --timeout",
    "POST /account/apps/{app}/deploys branch",
    "Publish BRANCH of APP's repository as a preview, at an address of its own.",
    QUEUED,
    fixed={"kind": "preview"},
)
deploys.sends(
    "end-preview APP SLUG",
    "DELETE /account/apps/{app}/previews/{slug}",
    "End a preview of APP. SLUG is the part of its host name between '--p-' and the first dot.",
    done("Ended the preview {slug} of {app}.", "ended", "slug"),
)
deploys.sends(
    "cancel DEPLOY",
    "POST /account/deploys/{deploy_id}/cancel",
    "Cancel deploy ID, if it is queued or building.",
    sentence("{id} is {state}.", "state"),
)


# -- following a deploy --------------------------------------------------------------------------------------


class Screen:
    """Prints lines; in a terminal, with a spinner and a status below them."""

    def __init__(self, status: Status | None) -> None:
        self._status = status

    def print_line(self, text: str) -> None:
        if self._status is None:
            click.echo(text)
        else:
            from rich.text import Text

            self._status.console.print(Text.from_ansi(text), soft_wrap=True)

    def set_status(self, status: str) -> None:
        if self._status is not None:
            self._status.update(status)


@contextlib.contextmanager
def _open_screen(status: str) -> Iterator[Screen]:
    output = console()
    if not output.is_terminal:
        yield Screen(None)
        return
    with output.status(status) as spinner:
        yield Screen(spinner)


def _follow_deploy(deploy_id: str, timeout: int) -> None:
    """Raises ServiceRefusal if the deploy fails or has not ended after `timeout` seconds."""
    try:
        with _open_screen("queued") as screen:
            deploy = _wait_for_end(deploy_id, timeout, None if wants_json() else screen)
    except KeyboardInterrupt:
        print_note(f"The deploy continues. Follow it again with: capsule deploys show {deploy_id} --follow")
        raise
    if wants_json():
        show_json(deploy)
    if deploy["state"] != "live":
        state = "was canceled" if deploy["state"] == "canceled" else "failed"
        if not wants_json():
            print_note(strip_controls(f"Served: {_describe_served(deploy)}"))
            if step := _describe_next_step(deploy):
                print_note(strip_controls(f"Next: {step}"))
        raise ServiceRefusal(f"{deploy_id} {state}: {text_of('error')(deploy) or 'the reason is unknown'}")
    if not wants_json():
        name = "Preview" if _name_kind(deploy) else "Live"
        click.echo(f"{name} at {text_of('url')(deploy)} after {duration_of('durationMs')(deploy)}.")


def _wait_for_end(deploy_id: str, timeout: int, screen: Screen | None) -> dict[str, Any]:
    service, address = open_service(), path("account", "deploys", deploy_id)
    previous_state, printed, started = "", 0, time.monotonic()
    while True:
        new = {"logAfter": printed}
        deploy = retry(partial(service.request_object, "GET", address, having="state", query=new), POLL_SECONDS)
        state, waited = strip_controls(str(deploy["state"])), time.monotonic() - started
        if screen is not None:
            screen.set_status(f"{state}, {waited:.0f} s")
            new_state = state if state not in (previous_state, *FINAL_STATES) else None
            _print_progress(screen, deploy, new_state)
            printed = deploy["logLines"] if isinstance(deploy.get("logLines"), int) else printed
        if state in FINAL_STATES:
            return deploy
        if waited > timeout:
            command = f"capsule deploys show {deploy_id} --follow"
            raise ServiceRefusal(f"{deploy_id} is still {state} after {timeout} s; continue with: {command}")
        previous_state = state
        time.sleep(POLL_SECONDS)


def _print_progress(screen: Screen, deploy: Row, new_state: str | None) -> None:
    """Prints the new lines of the log and the new state."""
    lines = _log_lines(deploy)
    if new_state is not None:
        # Nothing is logged before "building"; any other state begins after what is in the log so far.
        lines.insert(0 if new_state == "building" else len(lines), f"── {new_state}")
    for line in lines:
        screen.print_line(line)


def _log_lines(deploy: Row) -> list[str]:
    """Returns the log as a terminal shows it: with its colors if they are enabled, without other control sequences."""
    colors_enabled = console().color_system is not None
    lines = []
    log = text_of("log")(deploy)
    for line in log.removesuffix("\n").split("\n") if log else []:
        codes = COLOR.findall(line)
        if colors_enabled and codes:
            parts = zip(COLOR.split(line), [*codes, "\x1b[0m"], strict=True)
            lines.append("".join(strip_controls(part) + code for part, code in parts))
        else:
            lines.append(strip_controls(COLOR.sub("", line)))
    return lines
