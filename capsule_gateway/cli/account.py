"""`capsule account`, `hooks`, `webhooks` and `deliveries`: the commands for one account."""

from typing import Any

import click

from capsule_gateway.cli.arguments import TIME, complete_delivery, limit
from capsule_gateway.cli.cells import (
    Cell,
    Row,
    age_of,
    color_state,
    duration_of,
    format_count,
    format_euro,
    format_size,
    format_spending,
    nested_row,
    strip_controls,
    text_of,
    texts,
)
from capsule_gateway.cli.commands import Answer, Group, done, sentence, value
from capsule_gateway.cli.follow import clock_of, follow_option, follow_rows
from capsule_gateway.cli.service import Service, ServiceRefusal, WrongUsage, open_service, path
from capsule_gateway.cli.show import (
    as_json,
    as_list,
    print_next_page,
    show_fields,
    show_line,
    show_table,
    show_value,
)
from gateway.events import catalog


@click.group(cls=Group, invoke_without_command=True)
@click.option("--rename", "name", metavar="NAME", help="Rename the account first.")
@as_json
@click.pass_context
def account(context: click.Context, name: str | None) -> None:
    """Show the account, its plan and today's usage."""
    if context.invoked_subcommand is None:
        _show_account(name)


account.sends(
    "delete NAME",
    "POST /account/deletion name",
    "Delete the account with all apps and data, after a grace period. NAME is its name, as a confirmation.",
    sentence(
        "Stopped. The account is deleted at {deletesAt}. Until then, 'capsule account keep' brings it back.",
        "deletesAt",
    ),
)
account.sends(
    "keep",
    "DELETE /account/deletion",
    "Keep an account that is being deleted.",
    done("The account is kept, as it was.", "kept"),
)


def _show_account(name: str | None) -> None:
    service = open_service()
    if name is not None:
        service.send("PATCH", "/account", {"name": name})
    record = service.request_object("GET", "/account")
    spend, limits, storage = (nested_row(record, name) for name in ("spend", "limits", "storage"))
    reserved = f", and {format_euro(spend['reserved'])} EUR reserved" if spend.get("reserved") else ""
    per_app, per_user = limits.get("requestsPerMinutePerApp"), limits.get("requestsPerMinutePerUser")
    show_fields(
        record,
        {
            "account": f"{record.get('name')} ({record.get('id')})",
            "suspended": text_of("reason")(nested_row(record, "suspension")),
            "deleted at": text_of("deletesAt"),
            "plan": text_of("plan"),
            "inference today": format_spending(spend) + reserved,
            "deploys today": f"{record.get('deploysToday')} of {limits.get('deploysPerDay')}",
            "storage": f"{format_size(storage.get('bytes'))} of {format_size(storage.get('limit'))}" if storage else "",
            "per minute": f"{per_app} requests per app, {per_user} per user",
            "per request": f"up to {format_size(limits.get('maxRequestBytes'))} in, "
            f"{limits.get('maxOutputTokens')} tokens out",
        },
    )


# -- deploy hooks --------------------------------------------------------------------------------------------


hooks = Group(
    "hooks",
    formerly={"revoke": "remove"},
    help="Manage deploy hooks: secret URLs that deploy an app.",
)
hooks.sends(
    "create APP",
    "POST /account/apps/{app}/hooks name",
    "Create a hook for APP. Its URL is shown only once.",
    value("url", "Created hook {id} for {app}. Keep this URL secret: it deploys the app. It is shown only once:"),
    click.option("--name", required=True, help="Label that says what the hook is for."),
)
hooks.lists(
    "list",
    "/account/hooks",
    "List the hooks of all apps, newest first.",
    texts("name", "id", "app") | {"created": age_of("createdAt"), "last used": age_of("lastUsedAt", "never")},
    prose="name",
    cut=["app"],
    less=["created", "last used"],
    empty="No hooks. Create one with: capsule hooks create APP --name NAME",
)
hooks.sends(
    "remove HOOK",
    "DELETE /account/hooks/{hook_id}",
    "Revoke and remove a hook. Its URL stops working at once.",
    done("Revoked {hook_id}. Its URL now answers 404.", "revoked", "hook_id"),
)


# -- the webhook ---------------------------------------------------------------------------------------------


webhooks = Group("webhooks", formerly={"clear": "remove"}, help="Manage the webhook: the URL that receives events.")


@webhooks.command("show")
@as_json
def webhook_show() -> None:
    """Show the URL that receives events."""
    fields = {
        "url": text_of("url"),
        "set": age_of("createdAt"),
        "previous secret until": text_of("previousSecretUntil"),
    }
    show_fields(_require_webhook(open_service()), fields)


def _require_webhook(service: Service) -> Row:
    try:
        return service.request_object("GET", "/account/webhook", having="url")
    except ServiceRefusal as refused:
        if refused.status == 404:
            raise ServiceRefusal("no webhook is set; set one with: capsule webhooks set URL") from None
        raise


def _show_change(record: Row, **_: str) -> None:
    if "secret" not in record:
        return show_line(record, "Events already go to this URL. The signing secret is unchanged.")
    note = f"Events go to {record.get('url')}. They are signed with this secret, which is shown only once:"
    show_value(record, "secret", note)


webhooks.sends(
    "set URL",
    "PUT /account/webhook url",
    "Send all events to URL. A new URL gets a new signing secret, which is shown only once.",
    Answer("url", _show_change),
)
webhooks.sends(
    "rotate",
    "POST /account/webhook/rotate",
    "Create a new signing secret, which is shown only once. For 24 hours, the old secret signs too.",
    value(
        "secret",
        "For 24 hours, events are signed with both this new secret and the old one. Configure your receiver before you "
        "rotate again. The new secret is shown only once:",
    ),
    check=_require_webhook,
)
webhooks.sends(
    "remove",
    "DELETE /account/webhook",
    "Stop sending events, and delete the signing secret.",
    done("Cleared. Events are dropped until you set a webhook.", "cleared"),
)
webhooks.sends(
    "test",
    "POST /account/webhook/test type=event",
    f"Send a sample event, marked as a sample.\n\nTYPE is one of {', '.join(catalog.SAMPLES)}.",
    sentence("Queued a sample of {event} as {id}. See the outcome with: capsule deliveries list"),
    click.argument("event", metavar="TYPE", type=click.Choice(list(catalog.SAMPLES))),
    check=_require_webhook,
)


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


NO_DELIVERIES = "No deliveries yet. Send a sample with: capsule webhooks test deploy.succeeded"
DELIVERY_LAYOUT: dict[str, Any] = {"cut": ["app"], "less": ["notes", "took", "app"]}
OUTCOME = {"took": duration_of("durationMs"), "outcome": _format_outcome}
DELIVERY_COLUMNS = texts(id="id", event="type", app="app") | {"at": age_of("at")} | OUTCOME | {"notes": _format_notes}


deliveries = Group("deliveries", help="Show deliveries to the webhook, and redeliver events.")


@deliveries.command("list")
@limit
@click.option("--type", "event", metavar="TYPE", type=click.Choice(list(catalog.SAMPLES)), help="List only this type.")
@click.option("--app", metavar="APP", help="List only this app.")
@click.option("--outcome", type=click.Choice(["delivered", "failed", "dropped"]), help="List only this outcome.")
@click.option("--since", metavar="TIME", type=TIME, help="List only deliveries since this time, such as 1h.")
@click.option("--until", metavar="TIME", type=TIME, help="List only deliveries before this time.")
@click.option("--before", metavar="ID", help="List only deliveries older than this one (the next page).")
@follow_option
@as_list
def deliveries_list(limit: int, event: str | None, before: str | None, follow: bool, **filters: str | None) -> None:
    """List deliveries, newest first. With --follow, oldest first, times in UTC."""
    service, query = open_service(), {"type": event, "before": before, **filters}

    def fetch(count: int) -> list[dict[str, Any]]:
        return service.list_rows("/account/deliveries", limit=count, **query)

    if follow:
        if before is not None:
            raise WrongUsage("give either --follow or --before")
        follow_rows(fetch, limit, "attempt", {**DELIVERY_COLUMNS, "at": clock_of}, **DELIVERY_LAYOUT)
    rows = fetch(limit)
    empty = "No such deliveries." if any(query.values()) else NO_DELIVERIES
    show_table(rows, DELIVERY_COLUMNS, **DELIVERY_LAYOUT, empty=empty)
    print_next_page(rows, limit, "attempt")


@deliveries.shows("show DELIVERY", "GET /account/deliveries/{id}", "outcome")
def deliveries_show(row: Row, **_: str) -> None:
    """Show a delivery: its request and the receiver's response.

    ID is an event's id, which selects its newest delivery, or an attempt from 'capsule deliveries list --json'.
    """
    event = {"event": f"{text_of('type')(row)} ({text_of('id')(row)})"}
    show_fields(row, event | texts("app", "at") | OUTCOME | texts("url") | {"notes": _format_notes})
    _print_message("Request", nested_row(row, "request"))
    if response := nested_row(row, "response"):
        _print_message(f"Response, status {strip_controls(str(response.get('status')))}", response)


def _print_message(title: str, message: Row) -> None:
    click.echo(f"\n{title}")
    headers = [f"{name}: {value}" for name, value in nested_row(message, "headers").items()]
    body = message.get("body")
    for line in [*headers, *(["(no longer stored)"] if body is None else str(body).splitlines())]:
        click.echo(f"  {strip_controls(line)}")


@deliveries.command("redeliver")
@click.argument("delivery_id", metavar="[ID]", required=False, shell_complete=complete_delivery)
@click.option("--failed", is_flag=True, help="Redeliver all events whose newest delivery failed.")
@click.option(
    "--since", metavar="TIME", type=TIME, help="With --failed: events since then, such as 1h or an ISO 8601 time."
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
        body = {"since": since, "outcome": "failed"}
        record = open_service().request_object("POST", "/account/deliveries/redeliver", body, having="count")
        note = f"Queued {format_count(record['count'], 'failed event')} again."
    else:
        raise WrongUsage("give either the ID of an event, or --failed and --since")
    show_line(record, f"{strip_controls(note)} See the outcome with: capsule deliveries list")
