"""`capsule usage` and `capsule requests`: the account's usage, and its latest requests."""

from __future__ import annotations

import datetime
from collections.abc import Callable

import click

from gateway.cli.account import limit
from gateway.cli.service import open_service
from gateway.cli.show import (
    Cell,
    Row,
    age_of,
    as_json,
    duration_of,
    format_euro,
    show_json,
    show_table,
    text_of,
    wants_json,
)

UNKNOWN = "(unknown)"  # the request was refused before its app or model was known


@click.command()
@click.option(
    "--days",
    metavar="N",
    type=click.IntRange(1, 400),
    help="Show the last N days by day, including today. The default is the last 24 hours, by hour.",
)
@click.option("--by", "group", type=click.Choice(["app", "model"]), help="Show one row per app or model.")
@as_json
def usage(days: int | None, group: str | None) -> None:
    """Show requests, tokens and money by hour or day.

    An interrupted answer ended early and is charged at its maximum cost. Times are in UTC.
    """
    query = {"by": "hour" if days is None else "day", "group": group or "none"}
    if days is not None:
        query["from"] = (datetime.datetime.now(datetime.UTC).date() - datetime.timedelta(days=days - 1)).isoformat()
    record = open_service().request_object("GET", "/account/usage", having="rows", query=query)
    if wants_json():
        return show_json(record)
    columns: dict[str, Callable[[Row], Cell]] = {
        "day" if days else "hour": lambda row: text_of("start")(row)[: 10 if days else 16].replace("T", " "),
    }
    if group:
        columns[group] = lambda row: text_of(group)(row) or UNKNOWN
    columns |= {
        "requests": text_of("requests"),
        "refused": text_of("refused"),
        "interrupted": text_of("interrupted"),
        "tokens in": text_of("inputTokens"),
        "tokens out": text_of("outputTokens"),
        "eur": _euro_of("nanoEuro"),
        "interrupted eur": _euro_of("interruptedNanoEuro"),
    }
    show_table(record["rows"], columns, empty="No requests in this period.")


def _euro_of(name: str) -> Callable[[Row], str]:
    return lambda row: format_euro(row.get(name))


@click.command()
@click.option("--app", metavar="APP", help="List only requests to this app.")
@click.option("--model", metavar="MODEL", help="List only requests to this model.")
@click.option(
    "--outcome", type=click.Choice(["answered", "interrupted", "refused"]), help="List only requests with this outcome."
)
@limit
@as_json
def requests(app: str | None, model: str | None, outcome: str | None, limit: int) -> None:
    """List the latest requests to the account's apps, newest first."""
    rows = open_service().list_rows("/account/requests", app=app, model=model, outcome=outcome, limit=limit)
    show_table(
        rows,
        {
            "request": text_of("id"),
            "arrived": age_of("at"),
            "app": text_of("app"),
            "model": text_of("model"),
            "status": lambda row: f"{row.get('status') or ''} {text_of('code')(row)}".strip(),
            "in": text_of("inputTokens"),
            "out": text_of("outputTokens"),
            "eur": _euro_of("nanoEuro"),
            "first token": duration_of("ttftMs"),
            "took": duration_of("durationMs"),
        },
        empty="No such requests." if any((app, model, outcome)) else "No requests yet.",
    )
