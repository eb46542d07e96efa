"""`capsule env`: an app's environment variables. `capsule logs`: the output of its start command.

The commands read values from a prompt, standard input or a file, never from the command line, which every process of
the machine can see and which shells keep in their history.
"""

import sys
import time
from pathlib import Path
from typing import Any

import click

from capsule_gateway.cli.arguments import TIME, NumberType, app_argument, complete_variable
from capsule_gateway.cli.cells import age_of, strip_controls, text_of
from capsule_gateway.cli.commands import Group
from capsule_gateway.cli.service import Service, ServiceRefusal, WrongUsage, open_service, path, suggest
from capsule_gateway.cli.show import as_json, as_list, show_line, show_table

MAX_RECONNECTS = 15  # in a row
PAUSE_SECONDS = 1.0


env = Group(
    "env",
    formerly={"unset": "remove"},
    help="Set the environment variables of an app's builds and start command.\n\nChanges apply from the next deploy.",
)
PREVIEW = "Change what previews have; they have the app's variables otherwise."
preview_option = click.option("--preview", is_flag=True, help=PREVIEW)


@env.command("list")
@app_argument
@click.option("--preview", is_flag=True, help="List the variables of previews.")
@as_list
def env_list(app: str, preview: bool) -> None:
    """List the names of APP's variables. Values are never shown."""
    columns = {"name": text_of("name"), "set": age_of("updatedAt")}
    if preview:
        columns["in previews"] = text_of("inPreviews")
    rows = open_service().list_rows(path("account", "apps", app, "env"), **_query(preview))
    show_table(rows, columns, empty=f"No variables yet. Set one with: capsule env set {app} NAME")


@env.command("set")
@app_argument
@click.argument("name", metavar="[NAME]", default="", shell_complete=complete_variable)
@click.option(
    "--file",
    "source",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Set all variables of a file with lines NAME=value.",
)
@preview_option
@click.option("--no-value", is_flag=True, help="With --preview: previews do not have the variable.")
@as_json
def env_set(app: str, name: str, source: Path | None, preview: bool, no_value: bool) -> None:
    """Set variable NAME of APP.

    The command prompts for the value. A script passes it on standard input: capsule env set APP NAME < value
    """
    if bool(name) == bool(source):
        raise WrongUsage("give either a NAME or --file")
    if no_value and not (name and preview):
        raise WrongUsage("give --no-value with a NAME and --preview")
    if "=" in name:
        known = name.partition("=")[0]
        raise WrongUsage(
            f"keep the value off the command line: run 'capsule env set {app} {known}', and type it at the prompt"
        )
    if source is not None:
        values: dict[str, Any] = {**_read_file(source)}
    else:
        values = {name: False if no_value else _read_value(name)}
    service, address = open_service(), path("account", "apps", app, "env")
    if preview:
        _list_rows(service, address, preview)  # refuses to set the live values at an older service
    service.send("PUT", address, values, **_query(preview))
    done = "Kept {} out of" if no_value else "Set {} for"
    show_line(
        {"set": [*values]}, f"{done.format(', '.join(values))} {_name(app, preview)}, effective from the next deploy."
    )


@env.command("remove")
@app_argument
@click.argument("names", metavar="NAME...", nargs=-1, required=True, shell_complete=complete_variable)
@preview_option
@as_json
def env_remove(app: str, names: tuple[str, ...], preview: bool) -> None:
    """Remove variables from APP. If one of them is not set, none is removed."""
    service, address = open_service(), path("account", "apps", app, "env")
    present = [row["name"] for row in _list_rows(service, address, preview) if row.get("inPreviews") != "same"]
    if missing := [name for name in names if name not in present]:
        lack = f"previews of {app} have no value of their own for" if preview else f"{app} has no variable"
        raise ServiceRefusal(f"{lack} {missing[0]}{suggest(missing[0], present)}; nothing was removed")
    service.send("PUT", address, dict.fromkeys(names), **_query(preview))
    show_line(
        {"removed": [*names]}, f"Removed {', '.join(names)} from {_name(app, preview)}, effective from the next deploy."
    )


def _list_rows(service: Service, address: str, preview: bool) -> list[dict[str, Any]]:
    """Refuses to go on at an older service, which takes the live values for those of previews."""
    rows = service.list_rows(address, **_query(preview))
    if preview and any("inPreviews" not in row for row in rows):
        raise ServiceRefusal("this service has no values for previews yet; nothing was changed")
    return rows


def _query(preview: bool) -> dict[str, Any]:
    return {"kind": "preview"} if preview else {}


def _name(app: str, preview: bool) -> str:
    return f"previews of {app}" if preview else app


def _read_value(name: str) -> str:
    if sys.stdin.isatty():
        value: str = click.prompt(f"Value of {name}", hide_input=True, default="", show_default=False, err=True)
        return value
    return sys.stdin.read().removesuffix("\n")


def _read_file(source: Path) -> dict[str, str | None]:
    """Returns the variables of the file. Raises WrongUsage, which names the line but never quotes it."""
    from gateway.settings.text_files import decode_text, read_variables

    try:
        values: dict[str, str | None] = {**read_variables(decode_text(source.read_bytes()))}
    except ValueError as error:
        raise WrongUsage(f"{source}, {error}") from None
    if not values:
        raise WrongUsage(f"{source} sets no variables")
    return values


# -- runtime logs --------------------------------------------------------------------------------------------


@click.command()
@app_argument
@click.option(
    "--tail",
    type=NumberType(1, 10_000),
    help="Number of lines from the end.  [default: 200; with --since or --until, all]",
)
@click.option("--since", metavar="TIME", type=TIME, help="Print only lines since this time, such as 1h.")
@click.option("--until", metavar="TIME", type=TIME, help="Print only lines before this time.")
@click.option("--follow", is_flag=True, help="Print new lines until you press Ctrl-C.")
def logs(app: str, tail: int | None, since: str | None, until: str | None, follow: bool) -> None:
    """Print the output of APP's start command."""
    service, address = open_service(), path("account", "apps", app, "logs")
    if follow:
        if until is not None:
            raise WrongUsage("give either --follow or --until")
        return _follow_output(service, address, {"tail": tail, "since": since})
    for line in service.read_text(address, tail=tail, since=since, until=until).splitlines():
        click.echo(strip_controls(line))


def _follow_output(service: Service, address: str, query: dict[str, Any]) -> None:
    """Prints the stream, and reconnects when the service restarts or ends it."""
    failures = 0
    while True:
        try:
            for line in service.stream_events(address, **query):
                failures = 0
                click.echo(strip_controls(line))
        except ServiceRefusal as refused:
            failures += 1
            if not refused.temporary or failures > MAX_RECONNECTS:
                raise
        query = {"tail": 1}  # prints the last line again, because the service cannot resume a stream
        time.sleep(PAUSE_SECONDS)
