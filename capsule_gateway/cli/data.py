"""`capsule data`: the data of an app's start command, and their snapshots."""

import sys
from pathlib import Path

import click

from capsule_gateway.cli.arguments import app_argument, complete_snapshot
from capsule_gateway.cli.cells import Row, age_of, format_size, strip_controls, text_of, texts
from capsule_gateway.cli.commands import Answer, Group
from capsule_gateway.cli.deploys import QUEUED
from capsule_gateway.cli.service import ServiceRefusal, WrongUsage, open_service, path, replace_file
from capsule_gateway.cli.show import as_json, as_list, show_fields, show_json, show_line, show_table, wants_json

ANSWER_SECONDS = 660.0  # for the host that has the data
DATA = "/account/apps/{app}/data"
SNAPSHOT_COLUMNS = {
    "id": text_of("id"),
    "made": age_of("at"),
    "size": lambda row: format_size(row.get("bytes")),
    **texts(reason="reason", deploy="deployId"),
}

data = Group(
    "data",
    help="Keep, download, restore and clear the data of an app.\n\n"
    "These are the files that its start command writes to DATA_DIR.",
)


@data.shows("show APP", f"GET {DATA}", "state")
def data_show(answer: Row, app: str) -> None:
    """Show how much data APP has, and its snapshots."""
    used, limit = format_size(answer.get("usedBytes")), format_size(answer.get("limitBytes"))
    show_fields(answer, {"app": app, **texts("state"), "used": f"{used} of {limit}", **texts("problem")})
    click.echo("\nSnapshots:")
    advice = "" if answer["state"] == "none" else f"; to make one, run: capsule data snapshot {app}"
    show_table(_list_snapshots(answer), SNAPSHOT_COLUMNS, empty=f"none{advice}")


def _show_snapshot(answer: Row, **_: str) -> None:
    show_line(answer, strip_controls(f"Made snapshot {answer['id']} ({format_size(answer.get('bytes'))})."))


data.sends(
    "snapshot APP",
    f"POST {DATA}/snapshots",
    "Make a snapshot of APP's data now, up to 6 times per hour. The app keeps running.",
    Answer("id", _show_snapshot),
    seconds=ANSWER_SECONDS,
)


@data.command("download")
@app_argument
@click.argument("snapshot", metavar="[ID]", default="", shell_complete=complete_snapshot)
@click.option("--output", "-o", type=click.Path(dir_okay=False, path_type=Path), help="File to write; - for stdout.")
def data_download(app: str, snapshot: str, output: Path | None) -> None:
    """Download snapshot ID of APP, by default the newest, as a tar.gz."""
    service = open_service()
    if not snapshot:
        found = _list_snapshots(service.request_object("GET", path("account", "apps", app, "data"), having="state"))
        if not found:
            raise ServiceRefusal(f"{app} has no snapshot yet; to make one, run: capsule data snapshot {app}")
        snapshot = text_of("id")(found[0])
    address = path("account", "apps", app, "data", "snapshots", snapshot)
    if output == Path("-"):
        for chunk in service.download(address):
            sys.stdout.buffer.write(chunk)
        return
    target = output or Path(f"{app}-{snapshot}.tar.gz")
    if not target.absolute().parent.is_dir():
        raise WrongUsage(f"there is no folder {target.parent} to write {target.name} to")
    with replace_file(target) as file:
        for chunk in service.download(address):
            file.write(chunk)
    click.echo(f"Wrote {target} ({format_size(target.stat().st_size)}).")


data.sends(
    "restore APP SNAPSHOT --follow --timeout",
    f"POST {DATA}/restore snapshotId=snapshot_id",
    "Deploy APP's live release again, on the data of a snapshot.\n\nThe present data are kept as a snapshot first. "
    "'capsule data deleted' lists snapshots of deleted apps, which any app can restore.",
    QUEUED,
)


@data.command("clear")
@app_argument
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@as_json
def data_clear(app: str, yes: bool) -> None:
    """Clear the data of APP, after a snapshot. APP restarts with an empty folder."""
    if not yes:
        if not sys.stdin.isatty():
            raise WrongUsage("this clears all data of the app; add --yes to confirm it")
        click.confirm(f"Clear all data of {app}?", abort=True, err=True)
    open_service().send("DELETE", path("account", "apps", app, "data"), seconds=ANSWER_SECONDS)
    show_line({"cleared": app}, f"Cleared the data of {app}. To list its snapshots, run: capsule data show {app}")


@data.command("deleted")
@as_list
def data_deleted() -> None:
    """List the snapshots of deleted apps, which are kept for 7 days."""
    deleted = open_service().list_rows("/account/data/deleted")
    if wants_json():
        return show_json(deleted)
    rows = [{"app": each.get("app"), **snapshot} for each in deleted for snapshot in _list_snapshots(each)]
    show_table(rows, {"app": text_of("app"), **SNAPSHOT_COLUMNS}, empty="No data of deleted apps.")


def _list_snapshots(answer: Row) -> list[Row]:
    found = answer.get("snapshots")
    return [row for row in found if isinstance(row, dict)] if isinstance(found, list) else []
