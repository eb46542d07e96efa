"""`capsule usage` and `capsule requests`: the account's usage, and its latest requests."""

import datetime
from collections.abc import Callable
from typing import Any

import click

from capsule_gateway.cli.arguments import TIME, NumberType, RenamedOption, complete_request, limit
from capsule_gateway.cli.cells import Columns, Row, age_of, duration_of, format_euro, nested_row, text_of, texts
from capsule_gateway.cli.follow import clock_of, follow_option, follow_rows
from capsule_gateway.cli.service import open_service, path
from capsule_gateway.cli.show import (
    as_list,
    print_next_page,
    print_note,
    show_fields,
    show_json,
    show_table,
    wants_json,
    wants_table,
)

UNKNOWN = "(unknown)"  # the request was refused before its app or model was known


def usage_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options that choose a period and rows."""
    by = click.option("--by", "group", type=click.Choice(["app", "model"]), help="Show one row per app or model.")
    days = click.option(
        "--days",
        type=NumberType(1, 400),
        help="Show the last N days by day, including today. The default is the last 24 hours, by hour.",
    )
    return days(by(command))


@click.command()
@usage_options
@as_list
def usage(days: int | None, group: str | None) -> None:
    """Show requests, tokens and money by hour or day.

    An interrupted answer ended early and is charged at its maximum cost. Times are in UTC.
    """
    show_usage("/account/usage", days, group)


def show_usage(address: str, days: int | None, group: str | None) -> None:
    query = {"by": "hour" if days is None else "day", "group": group or "none"}
    if days is not None:
        query["from"] = (datetime.datetime.now(datetime.UTC).date() - datetime.timedelta(days=days - 1)).isoformat()
    record = open_service().request_object("GET", address, having="rows", query=query)
    if wants_json():
        return show_json(record)
    period = {"day" if days else "hour": lambda row: text_of("start")(row)[: 10 if days else 16].replace("T", " ")}
    groups = {group: lambda row: text_of(group)(row) or UNKNOWN} if group else {}
    tokens = texts("requests", "refused", "interrupted", tokens_in="inputTokens", tokens_out="outputTokens")
    euros = {"eur": _euro_of("nanoEuro"), "interrupted eur": _euro_of("interruptedNanoEuro")}
    show_table(
        record["rows"],
        period | groups | tokens | euros,
        cut=["app", "model"],
        less=["interrupted eur", "interrupted"],
        empty="No requests in this period.",
    )


def _euro_of(name: str) -> Callable[[Row], str]:
    return lambda row: format_euro(row.get(name))


REQUEST_COLUMNS: Columns = {
    "request": text_of("id"),
    "arrived": age_of("at"),
    **texts("app", "model"),
    "status": lambda row: " ".join(filter(None, [str(row.get("status") or ""), _format_code(row)])),
    **texts(**{"in": "inputTokens", "out": "outputTokens"}),
    "eur": _euro_of("nanoEuro"),
    "first token": duration_of("ttftMs"),
    "took": duration_of("durationMs"),
}
REQUEST_LAYOUT: dict[str, Any] = {"cut": ["app", "model"], "less": ["first token", "model", "in", "out", "eur"]}


def _format_code(row: Row) -> str:
    """Returns the error code of the request, and why its token was refused."""
    reason = text_of("reason")(row)
    return f"{text_of('code')(row)} ({reason})" if reason else text_of("code")(row)


@click.command()
@click.argument("request_id", metavar="[ID]", required=False, shell_complete=complete_request)
@click.option("--app", metavar="APP", help="List only requests to this app.")
@click.option("--model", metavar="MODEL", help="List only requests to this model.")
@click.option(
    "--outcome", type=click.Choice(["answered", "interrupted", "refused"]), help="List only requests with this outcome."
)
@click.option("--code", metavar="CODE", help="List only requests with this error code, such as TOKEN_INVALID.")
@click.option(
    "--since",
    "from",
    cls=RenamedOption,
    formerly=["--from"],
    metavar="TIME",
    type=TIME,
    help="List only requests since this time, such as 1h.",
)
@click.option(
    "--until",
    "to",
    cls=RenamedOption,
    formerly=["--to"],
    metavar="TIME",
    type=TIME,
    help="List only requests before this time.",
)
@click.option("--before", metavar="ID", help="List only requests older than this one (the next page).")
@limit
@follow_option
@as_list
def requests(request_id: str | None, limit: int, follow: bool, **filters: str | None) -> None:
    """List the latest requests to the account's apps, newest first. With --follow, oldest first, times in UTC.

    With ID, the command shows one request, with its reservation, its wait and the limits that were in force.
    """
    service = open_service()
    if request_id is not None:
        return _show_request(service.request_object("GET", path("account", "requests", request_id), having="limits"))

    def fetch(count: int) -> list[dict[str, Any]]:
        return service.list_rows("/account/requests", **filters, limit=count)

    if follow:
        follow_rows(fetch, limit, "id", {**REQUEST_COLUMNS, "arrived": clock_of}, **REQUEST_LAYOUT)
    empty = "No such requests." if any(filters.values()) else "No requests yet."
    rows = fetch(limit)
    show_table(rows, REQUEST_COLUMNS, **REQUEST_LAYOUT, empty=empty)
    if rows and wants_table():
        chosen = {name: value for name, value in filters.items() if name != "before"}
        print_note(_sum_up(service.request_object("GET", "/account/requests/figures", query=chosen, having="matching")))
    print_next_page(rows, limit, "id")


def _sum_up(figures: Row) -> str:
    """Returns the figures of all requests that match, of which the table shows a page."""
    times = {"first token": nested_row(figures, "firstTokenMs"), "full answer": nested_row(figures, "answerMs")}
    ranks = [
        f"{name} {', '.join(f'{rank} {duration_of(rank)(ranked)}' for rank in ranked)}"
        for name, ranked in times.items()
        if ranked
    ]
    matching = f"{figures.get('matching')} of the {figures.get('logged')} requests in the log match"
    return "; ".join([matching, *ranks]) + "."


def _show_request(request: Row) -> None:
    limits = {f"limit {text_of('name')(limit)}": _format_limit(limit) for limit in request.get("limits") or ()}
    columns = {name: cell for name, cell in REQUEST_COLUMNS.items() if name != "arrived"}
    times = {"arrived": text_of("at"), "waited": duration_of("waitedMs"), "reserved eur": _euro_of("reservedNanoEuro")}
    show_fields(request, {**columns, **times, **limits})


def _format_limit(limit: Row) -> str:
    used, most = limit.get("used"), limit.get("limit")
    if text_of("name")(limit).endswith("PerMinute"):
        return f"{used} of {most} requests"
    return f"{format_euro(used)} of {format_euro(most)} EUR"
