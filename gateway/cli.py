"""`capsule`: the command line tool, and the commands that run the service."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import click
import httpx
from rich.console import Console
from rich.table import Table

TIMEOUT = 15.0  # seconds


class Refused(click.ClickException):
    """The service said no: one line on stderr, exit 1."""

    def show(self, file: Any = None) -> None:
        click.echo(f"capsule: {self.message}", file=file or sys.stderr)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="capsule-gateway")
def main() -> None:
    """Managed inference, event webhooks and deploy hooks.

    Reads CAPSULE_URL (default http://localhost:8000) and CAPSULE_API_KEY: an account's API key, or the operator token
    for the operators' commands.
    """


# -- running the service -------------------------------------------------------------------------------------


@main.command()
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", default=8000, show_default=True, type=click.IntRange(1, 65535))
@click.option("--workers", default=1, show_default=True, type=click.IntRange(1, 64), help="Processes.")
def serve(host: str, port: int, workers: int) -> None:
    """Run the gateway."""
    from .server import serve as run
    from .settings import BadSettings, load

    try:
        settings = load()
    except BadSettings as error:
        raise Refused(f"the settings are wrong:\n{error}") from None
    run(host, port, workers, settings.drain)


@main.command()
@click.argument("names", nargs=-1)
def worker(names: tuple[str, ...]) -> None:
    """Run the workers named, or all."""
    from workers.__main__ import main as run

    sys.exit(run(list(names)))


# -- asking the service --------------------------------------------------------------------------------------


def call(method: str, path: str, body: dict[str, Any] | None = None) -> Any:
    """One request; the decoded answer, or Refused in one line."""
    url = os.environ.get("CAPSULE_URL", "http://localhost:8000").rstrip("/")
    key = os.environ.get("CAPSULE_API_KEY", "")
    if not key:
        raise click.UsageError("set CAPSULE_API_KEY to the account's API key, or to the operator token")
    try:
        answer = httpx.request(
            method, url + path, json=body, headers={"authorization": f"Bearer {key}"}, timeout=TIMEOUT
        )
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise Refused(f"{url} did not answer ({type(error).__name__}); is it running, and CAPSULE_URL right?") from None
    if answer.is_success:
        return answer.json() if answer.content else None
    try:
        said = answer.json()["error"]
        raise Refused(f"{said['message']} ({said['code']}, request {said['requestId']})")
    except (ValueError, KeyError, TypeError):
        raise Refused(f"{url}{path} answered {answer.status_code}") from None


def show(value: Any, as_json: bool) -> None:
    """A table for people, JSON for programs."""
    if as_json:
        click.echo(json.dumps(value, ensure_ascii=False))
        return
    rows = value if isinstance(value, list) else [value]
    if not rows:
        click.echo("none")
        return
    console = Console()
    if isinstance(value, dict):
        table = Table(show_header=False, box=None, pad_edge=False)
        for name, field in _flat(value):
            table.add_row(f"[dim]{name}[/]", str(field))
    else:
        table = Table(box=None, pad_edge=False, header_style="dim")
        for name in rows[0]:
            table.add_column(name)
        for row in rows:
            table.add_row(*("" if field is None else str(field) for field in row.values()))
    console.print(table)


def _flat(value: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    flat: list[tuple[str, Any]] = []
    for name, field in value.items():
        if isinstance(field, dict):
            flat += _flat(field, f"{prefix}{name}.")
        elif field is not None:
            flat.append((prefix + name, field))
    return flat


as_json = click.option("--json", "as_json", is_flag=True, help="For programs.")


@main.command()
@as_json
def account(as_json: bool) -> None:
    """The account, its limits and what it spent today (nano-euro)."""
    show(call("GET", "/account"), as_json)


@main.command()
@click.argument("action", type=click.Choice(["status", "on", "off", "approve", "unapprove"]))
@as_json
def inference(action: str, as_json: bool) -> None:
    """Operators: the inference switch and the processing approval."""
    changes = {
        "on": {"enabled": True},
        "off": {"enabled": False},
        "approve": {"approved": True},
        "unapprove": {"approved": False},
    }
    if action == "status":
        show(call("GET", "/platform/inference"), as_json)
    else:
        show(call("PUT", "/platform/inference", changes[action]), as_json)


@main.group()
def accounts() -> None:
    """Operators: accounts."""


@accounts.command("create")
@click.argument("name")
@click.option("--plan", default="free", show_default=True, type=click.Choice(["free", "starter", "maker", "max"]))
@as_json
def accounts_create(name: str, plan: str, as_json: bool) -> None:
    """Create an account; its API key shows only here."""
    show(call("POST", "/platform/accounts", {"name": name, "plan": plan}), as_json)


@accounts.command("plan")
@click.argument("account_id")
@click.argument("plan", type=click.Choice(["free", "starter", "maker", "max"]))
@as_json
def accounts_plan(account_id: str, plan: str, as_json: bool) -> None:
    """Change an account's plan."""
    show(call("PATCH", f"/platform/accounts/{account_id}", {"plan": plan}), as_json)


@main.group()
def apps() -> None:
    """Operators: apps."""


@apps.command("put")
@click.argument("app")
@click.argument("record", type=click.File("r"))
@as_json
def apps_put(app: str, record: Any, as_json: bool) -> None:
    """Create or replace an app from a JSON file (- for standard input)."""
    try:
        body = json.load(record)
    except ValueError as error:
        raise click.UsageError(f"{record.name} is not JSON: {error}") from None
    show(call("PUT", f"/platform/apps/{app}", body), as_json)


@apps.command("show")
@click.argument("app")
@as_json
def apps_show(app: str, as_json: bool) -> None:
    """An app's record."""
    show(call("GET", f"/platform/apps/{app}"), as_json)


@apps.command("delete")
@click.argument("app")
def apps_delete(app: str) -> None:
    """Delete an app."""
    call("DELETE", f"/platform/apps/{app}")


if __name__ == "__main__":
    main()
