"""`capsule limits`: limits on the spending and requests of one app and of each of its users."""

import re
from collections.abc import Callable

import click

from capsule_gateway.cli.arguments import app_argument
from capsule_gateway.cli.cells import Row, format_spending, text_of
from capsule_gateway.cli.commands import Group
from capsule_gateway.cli.service import WrongUsage, open_service, path
from capsule_gateway.cli.show import as_json, show_fields
from gateway.accounts.app_limits import APP_LIMITS

limits = Group(
    "limits",
    help="Limit the spending and requests of an app and of each of its users.\n\nThe plan's limits are the maximum.",
)


@limits.shows("show APP", "GET /account/apps/{app}/limits", having="")
def limits_show(record: Row, app: str) -> None:
    """Show the limits of APP and its spending today."""
    spend = open_service().request_object("GET", path("account", "apps", app, "spend"), having="day")
    widest = spend.get("widest")
    fields = {"app": app, "spent today": format_spending(spend)}
    for name, limit in APP_LIMITS.items():
        unit = "EUR" if limit.is_money else "requests"
        allowed = text_of(name)(widest) if isinstance(widest, dict) else "?"
        own = text_of(name)(record)
        bound = f"(the plan allows {allowed})" if own else "(the plan's limit)"
        fields[limit.label] = f"{own or allowed} {unit} {bound}"
    show_fields(record, fields)


def limit_options(command: Callable[..., None]) -> Callable[..., None]:
    for name, limit in reversed(APP_LIMITS.items()):
        command = click.option(limit.option, name, metavar="X" if limit.is_money else "N", help=limit.help)(command)
    return command


@limits.command("set")
@app_argument
@limit_options
@as_json
def limits_set(app: str, **options: str | None) -> None:
    """Set limits of APP. The value 'none' clears a limit, and 0 blocks all requests. Omitted limits do not change."""
    changes = {name: _read_limit(name, value) for name, value in options.items() if value is not None}
    if not changes:
        *others, last = (limit.option for limit in APP_LIMITS.values())
        raise WrongUsage(f"name at least one limit: {', '.join(others)} or {last}")
    record = open_service().request_object("PUT", path("account", "apps", app, "limits"), changes, having="")
    limits_show(record, app=app)


def _read_limit(name: str, value: str) -> str | int | None:
    """Returns the value for the service. An amount stays text, and the service checks it. Raises WrongUsage."""
    if value == "none":
        return None
    if APP_LIMITS[name].is_money:
        return value
    if not re.fullmatch(r"[0-9]{1,15}", value):
        raise WrongUsage(f"{APP_LIMITS[name].option}: {value!r} is not a whole number of requests, or none")
    return int(value)
