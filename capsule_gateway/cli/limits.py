"""`capsule limits`: limits on the spending and requests of one app and of each of its users."""

import re

import click

from capsule_gateway.cli.arguments import app_argument
from capsule_gateway.cli.cells import Row, format_spending, text_of
from capsule_gateway.cli.commands import Group
from capsule_gateway.cli.service import WrongUsage, open_service, path
from capsule_gateway.cli.show import as_json, show_fields

LIMITS = {
    "per day": ("dailyEuro", "EUR"),
    "per day and user": ("userDailyEuro", "EUR"),
    "per minute": ("requestsPerMinute", "requests"),
    "per minute and user": ("userRequestsPerMinute", "requests"),
}

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
    for label, (name, unit) in LIMITS.items():
        allowed = text_of(name)(widest) if isinstance(widest, dict) else "?"
        own = text_of(name)(record)
        fields[label] = f"{own} {unit} (the plan allows {allowed})" if own else f"{allowed} {unit} (the plan's limit)"
    show_fields(record, fields)


@limits.command("set")
@app_argument
@click.option("--daily-euro", "dailyEuro", metavar="X", help="Spending of the app per UTC day, such as 0.50.")
@click.option("--user-daily-euro", "userDailyEuro", metavar="X", help="Spending of each user per UTC day.")
@click.option("--rpm", "requestsPerMinute", metavar="N", help="Requests of the app in any minute.")
@click.option("--user-rpm", "userRequestsPerMinute", metavar="N", help="Requests of each user in any minute.")
@as_json
def limits_set(app: str, **options: str | None) -> None:
    """Set limits of APP. The value 'none' clears a limit, and 0 blocks all requests. Omitted limits do not change."""
    changes = {name: _read_limit(name, value) for name, value in options.items() if value is not None}
    if not changes:
        raise WrongUsage("name at least one limit: --daily-euro, --user-daily-euro, --rpm or --user-rpm")
    record = open_service().request_object("PUT", path("account", "apps", app, "limits"), changes, having="")
    limits_show(record, app=app)


def _read_limit(name: str, value: str) -> str | int | None:
    """Returns the value for the service. An amount stays text, and the service checks it. Raises WrongUsage."""
    if value == "none":
        return None
    if name.endswith("Euro"):
        return value
    if not re.fullmatch(r"[0-9]{1,15}", value):
        raise WrongUsage(f"{value!r} is not a number of requests; use a whole number, or none")
    return int(value)
