"""`capsule account`, `hook`, `webhook` and `deliveries`: the commands for one account."""

from __future__ import annotations

import datetime
import re
import time
from typing import Any, NoReturn

import click

from capsule_gateway.cli.arguments import app_argument, hook_argument
from capsule_gateway.cli.cells import (
    Cell,
    Columns,
    Row,
    age_of,
    color_state,
    duration_of,
    format_euro,
    format_size,
    nested_row,
    strip_controls,
    text_of,
)
from capsule_gateway.cli.follow import clock_of, follow_option, follow_rows
from capsule_gateway.cli.service import Refused, Service, WrongUsage, open_service, path
from capsule_gateway.cli.show import (
    as_json,
    as_list,
    print_note,
    show_fields,
    show_json,
    show_line,
    show_secret,
    show_table,
    wants_json,
    wants_table,
)
from gateway.events import catalog
from gateway.ids import now_iso

limit = click.option(
    "--limit", default=20, show_default=True, type=click.IntRange(1, 1000), help="Maximum number of rows."
)


@click.command()
@click.option("--rename", "name", metavar="NAME", help="First give the account this name.")
@as_json
def account(name: str | None) -> None:
    """Show the account, its plan and today's usage."""
    service = open_service()
    if name is not None:
        service.send("PATCH", "/account", {"name": name})
    record = service.request_object("GET", "/account")
    spend, limits, storage = (nested_row(record, name) for name in ("spend", "limits", "storage"))
    spent = f"{format_euro(spend.get('settled'))} of {format_euro(spend.get('cap'))} EUR"
    if spend.get("reserved"):
        spent += f", and {format_euro(spend['reserved'])} EUR reserved"
    show_fields(
        record,
        {
            "account": f"{record.get('name')} ({record.get('id')})",
            "suspended": text_of("reason")(suspension) if (suspension := nested_row(record, "suspension")) else None,
            "plan": text_of("plan"),
            "inference today": spent,
            "deploys today": f"{record.get('deploysToday')} of {limits.get('deploysPerDay')}",
            "storage": f"{format_size(storage.get('bytes'))} of {format_size(storage.get('limit'))}"
            if storage
            else None,
            "per minute": f"{limits.get('requestsPerMinutePerApp')} requests per app, "
            f"{limits.get('requestsPerMinutePerUser')} per user",
            "per request": f"up to {format_size(limits.get('maxRequestBytes'))} in, "
            f"{limits.get('maxOutputTokens')} tokens out",
        },
    )


# -- deploy hooks --------------------------------------------------------------------------------------------


@click.group()
def hook() -> None:
    """Manage deploy hooks: secret URLs that deploy an app."""


@hook.command("create")
@app_argument
@click.option("--name", required=True, help="Label that says what the hook is for.")
@as_json
def hook_create(app: str, name: str) -> None:
    """Create a hook for APP. Its URL is shown only once."""
    record = open_service().request_object("POST", path("account", "apps", app, "hooks"), {"name": name}, having="url")
    created = f"Created hook {record.get('id')} for {app}."
    show_secret(record, "url", f"{created} Keep this URL secret: it deploys the app. It is shown only once:")


@hook.command("list")
@as_list
def hook_list() -> None:
    """List the hooks of all apps, newest first."""
    rows = open_service().list_rows("/account/hooks")
    show_table(
        rows,
        {
            "name": text_of("name"),
            "id": text_of("id"),
            "app": text_of("app"),
            "created": age_of("createdAt"),
            "last used": age_of("lastUsedAt", "never"),
        },
        prose="name",
        cut=["app"],
        less=["created", "last used"],
        empty="No hooks. Create one with: capsule hook create APP --name NAME",
    )


@hook.command("revoke")
@hook_argument
@as_json
def hook_revoke(hook_id: str) -> None:
    """Revoke a hook. Its URL stops working at once."""
    open_service().send("DELETE", path("account", "hooks", hook_id))
    show_line({"revoked": hook_id}, f"Revoked {hook_id}. Its URL now answers 404.")


# -- the webhook ---------------------------------------------------------------------------------------------


@click.group()
def webhook() -> None:
    """Manage the webhook: the URL that receives events."""


@webhook.command("show")
@as_json
def webhook_show() -> None:
    """Show the URL that receives events."""
    record = _require_webhook(open_service())
    show_fields(
        record,
        {
            "url": text_of("url"),
            "set": age_of("createdAt"),
            "previous secret until": text_of("previousSecretUntil"),
        },
    )


def _require_webhook(service: Service) -> Row:
    try:
        return service.request_object("GET", "/account/webhook", having="url")
    except Refused as refused:
        if refused.status == 404:
            raise Refused("no webhook is set; set one with: capsule webhook set URL") from None
        raise


@webhook.command("set")
@click.argument("url")
@as_json
def webhook_set(url: str) -> None:
    """Send all events to URL. A new URL gets a new signing secret, which is shown only once."""
    record = open_service().request_object("PUT", "/account/webhook", {"url": url}, having="url")
    if "secret" not in record:
        return show_line(record, "Events already go to this URL. The signing secret is unchanged.")
    note = f"Events go to {record.get('url')}. They are signed with this secret, which is shown only once:"
    show_secret(record, "secret", note)


@webhook.command("rotate")
@as_json
def webhook_rotate() -> None:
    """Create a new signing secret, which is shown only once. For 24 hours, the old secret signs too."""
    service = open_service()
    _require_webhook(service)
    record = service.request_object("POST", "/account/webhook/rotate", having="secret")
    show_secret(
        record,
        "secret",
        "For 24 hours, events are signed with both this new secret and the old one. Configure your receiver before you "
        "rotate again. The new secret is shown only once:",
    )


@webhook.command("clear")
@as_json
def webhook_clear() -> None:
    """Stop sending events, and delete the signing secret."""
    open_service().send("DELETE", "/account/webhook")
    show_line({"cleared": True}, "Cleared. Events are dropped until you set a webhook.")


@webhook.command(
    "test", help=f"Send a sample event, marked as a sample.\n\nTYPE is one of {', '.join(catalog.SAMPLES)}."
)
@click.argument("event", metavar="TYPE", type=click.Choice(list(catalog.SAMPLES)))
@as_json
def webhook_test(event: str) -> None:
    service = open_service()
    _require_webhook(service)
    record = service.request_object("POST", "/account/webhook/test", {"type": event})
    note = f"Queued a sample of {event} as {record.get('id')}."
    show_line(record, f"{note} See the outcome with: capsule deliveries list")


# -- deliveries ----------------------------------------------------------------------------------------------


def _format_outcome(row: Row) -> Cell:
    outcome = color_state(row.get("outcome"))
    reason = f"{text_of('error')(row)} {text_of('status')(row)}".strip()
    return outcome.append(f" ({strip_controls(reason)})") if reason and outcome.plain != "delivered" else outcome


def _format_notes(row: Row) -> str:
    notes = ["sample"] if row.get("sample") else []
    if redelivery := row.get("redelivery"):
        notes.append(f"redelivery {redelivery}")
    return ", ".join(notes)


NO_DELIVERIES = "No deliveries yet. Send a sample with: capsule webhook test deploy.succeeded"
DELIVERY_COLUMNS: Columns = {
    "id": text_of("id"),
    "event": text_of("type"),
    "app": text_of("app"),
    "at": age_of("at"),
    "took": duration_of("durationMs"),
    "outcome": _format_outcome,
    "notes": _format_notes,
}
DELIVERY_LAYOUT: dict[str, Any] = {"cut": ["app"], "less": ["notes", "took", "app"]}


class _ListByDefault(click.Group):
    """A group that takes --follow for its command `list`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args[:1] == ["--follow"]:
            args = ["list", *args]
        return super().parse_args(ctx, args)


@click.group(cls=_ListByDefault)
def deliveries() -> None:
    """Show deliveries to the webhook, and redeliver events.

    'capsule deliveries --follow' is short for 'capsule deliveries list --follow'.
    """


@deliveries.command("list")
@limit
@click.option("--type", "event", metavar="TYPE", type=click.Choice(list(catalog.SAMPLES)), help="List only this type.")
@click.option("--app", metavar="APP", help="List only this app.")
@click.option("--outcome", type=click.Choice(["delivered", "failed", "dropped"]), help="List only this outcome.")
@click.option("--before", metavar="ID", help="List deliveries older than this one (the next page).")
@follow_option
@as_list
def deliveries_list(
    limit: int, event: str | None, app: str | None, outcome: str | None, before: str | None, follow: bool
) -> None:
    """List deliveries, newest first. With --follow, oldest first, times in UTC."""
    service, query = open_service(), {"type": event, "app": app, "outcome": outcome, "before": before}
    if follow:
        if before is not None:
            raise WrongUsage("give either --follow or --before")
        _follow_deliveries(service, limit, query)
    rows = service.list_rows("/account/deliveries", limit=limit, **query)
    empty = "No such deliveries." if any(query.values()) else NO_DELIVERIES
    show_table(rows, DELIVERY_COLUMNS, **DELIVERY_LAYOUT, empty=empty)
    if len(rows) == limit and wants_table():
        print_note(f"More: capsule deliveries list --before {strip_controls(text_of('attempt')(rows[-1]))}")


def _follow_deliveries(service: Service, count: int, query: dict[str, str | None]) -> NoReturn:
    def fetch(count: int) -> list[dict[str, Any]]:
        return service.list_rows("/account/deliveries", limit=count, **query)

    follow_rows(fetch, count, "attempt", {**DELIVERY_COLUMNS, "at": clock_of("at")}, **DELIVERY_LAYOUT)


@deliveries.command("show")
@click.argument("delivery_id", metavar="ID")
@as_json
def deliveries_show(delivery_id: str) -> None:
    """Show a delivery: its request and the receiver's response.

    ID is an event's id, which selects its newest delivery, or an attempt from 'capsule deliveries list --json'.
    """
    row = open_service().request_object("GET", path("account", "deliveries", delivery_id), having="outcome")
    if wants_json():
        return show_json(row)
    request, response = nested_row(row, "request"), nested_row(row, "response")
    show_fields(
        row,
        {
            "event": f"{text_of('type')(row)} ({text_of('id')(row)})",
            "app": text_of("app"),
            "at": text_of("at"),
            "took": duration_of("durationMs"),
            "outcome": _format_outcome,
            "url": text_of("url"),
            "notes": _format_notes,
        },
    )
    _print_message("Request", request)
    if response:
        _print_message(f"Response, status {strip_controls(str(response.get('status')))}", response)


def _print_message(title: str, message: Row) -> None:
    click.echo(f"\n{title}")
    for name, value in nested_row(message, "headers").items():
        click.echo(f"  {strip_controls(f'{name}: {value}')}")
    body = message.get("body")
    lines = ["(no longer stored)"] if body is None else str(body).splitlines()
    for line in lines:
        click.echo(f"  {strip_controls(line)}")


@deliveries.command("redeliver")
@click.argument("delivery_id", metavar="[ID]", required=False)
@click.option("--failed", is_flag=True, help="Redeliver all events whose newest delivery failed.")
@click.option(
    "--since", metavar="TIME", help="With --failed: events since then, such as 30m, 1h, 2d or an ISO 8601 time."
)
@as_json
def deliveries_redeliver(delivery_id: str | None, failed: bool, since: str | None) -> None:
    """Send an event again, with the same id and a new signature.

    \b
    ID                     redelivers the event with this id
    --failed --since 1h    redelivers all events of the last hour whose newest delivery failed
    """
    if delivery_id is not None and not failed and since is None:
        record = open_service().request_object("POST", path("account", "deliveries", delivery_id, "redeliver"))
        note = f"Queued {delivery_id} again."
    elif delivery_id is None and failed and since is not None:
        body = {"since": _parse_since(since), "outcome": "failed"}
        record = open_service().request_object("POST", "/account/deliveries/redeliver", body, having="count")
        note = f"Queued {record['count']} failed event{'' if record['count'] == 1 else 's'} again."
    else:
        raise WrongUsage("give either the ID of an event, or --failed and --since")
    show_line(record, f"{strip_controls(note)} See the outcome with: capsule deliveries list")


def _parse_since(text: str) -> str:
    """Returns the time in ISO 8601. Raises WrongUsage."""
    if ago := re.fullmatch(r"(\d{1,6})([smhd])", text):
        seconds = int(ago[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86_400}[ago[2]]
        return now_iso(max(0, time.time() - seconds))
    try:
        return datetime.datetime.fromisoformat(text).isoformat()
    except ValueError:
        raise WrongUsage(f"{text!r} is not a time; use one like 30m, 1h, 2d or 2026-07-02T10:00:00Z") from None
