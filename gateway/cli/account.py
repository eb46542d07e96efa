"""`capsule account`, `hook`, `webhook`, `deliveries`: what an account holder looks at and changes."""

from __future__ import annotations

import click

from gateway.cli.service import Refused, path, service
from gateway.cli.show import (
    Cell,
    Row,
    as_json,
    clean,
    euro,
    plain,
    say,
    show_fields,
    show_json,
    show_table,
    size,
    time,
    took,
    word,
)
from gateway.events import catalogue

limit = click.option("--limit", default=20, show_default=True, type=click.IntRange(1, 1000), help="At most so many.")


@click.command()
@as_json
def account(as_json: bool) -> None:
    """The account, its plan, and what it used today."""
    found = service().fields("GET", "/account")
    if as_json:
        return show_json(found)
    spend, limits = _inner(found, "spend"), _inner(found, "limits")
    spent = f"{euro(spend.get('settled'))} of {euro(spend.get('cap'))} EUR"
    if spend.get("reserved"):
        spent += f", {euro(spend['reserved'])} more reserved"
    show_fields(
        {
            "account": f"{found.get('name')} ({found.get('id')})",
            "plan": plain("plan")(found),
            "inference today": spent,
            "deploys today": f"{found.get('deploysToday')} of {limits.get('deploysPerDay')}",
            "each minute": f"{limits.get('requestsPerMinutePerApp')} requests an app, "
            f"{limits.get('requestsPerMinutePerUser')} a user",
            "each request": f"at most {size(limits.get('maxRequestBytes'))} in, "
            f"{limits.get('maxOutputTokens')} tokens out",
        }
    )


def _inner(row: Row, name: str) -> Row:
    value = row.get(name)
    return value if isinstance(value, dict) else {}


# -- deploy hooks --------------------------------------------------------------------------------------------


@click.group()
def hook() -> None:
    """Deploy hooks: secret URLs that rebuild an app."""


@hook.command("create")
@click.argument("app")
@click.option("--name", required=True, help="What the hook is for; shown in the list.")
@as_json
def hook_create(app: str, name: str, as_json: bool) -> None:
    """Make a hook for APP. Its URL shows only this once."""
    made = service().fields("POST", path("account", "apps", app, "hooks"), {"name": name}, having="url")
    if as_json:
        return show_json(made)
    say(f"Hook {made.get('id')} of {app}. Whoever has this URL can deploy the app, and it shows only this once:")
    click.echo(made["url"])


@hook.command("list")
@as_json
def hook_list(as_json: bool) -> None:
    """The hooks of all apps, newest first."""
    rows = service().rows("/account/hooks")
    if as_json:
        return show_json(rows)
    show_table(
        rows,
        {
            "name": plain("name"),
            "id": plain("id"),
            "app": plain("app"),
            "created": time("createdAt"),
            "last used": time("lastUsedAt", "never"),
        },
        prose="name",
        empty="No hooks. Make one with: capsule hook create APP --name NAME",
    )


@hook.command("revoke")
@click.argument("hook_id", metavar="ID")
@as_json
def hook_revoke(hook_id: str, as_json: bool) -> None:
    """End a hook: its URL answers 404 at once."""
    service().do("DELETE", path("account", "hooks", hook_id))
    if as_json:
        return show_json({"revoked": hook_id})
    click.echo(f"Revoked {hook_id}: its URL answers 404 from now on.")


# -- the webhook ---------------------------------------------------------------------------------------------


@click.group()
def webhook() -> None:
    """The webhook: where the account's events are sent."""


@webhook.command("show")
@as_json
def webhook_show(as_json: bool) -> None:
    """Where events go."""
    try:
        found = service().fields("GET", "/account/webhook", having="url")
    except Refused as refused:
        if refused.status == 404:
            raise Refused("no webhook is set; set one with: capsule webhook set URL") from None
        raise
    if as_json:
        return show_json(found)
    show_fields({"url": plain("url")(found), "set": time("createdAt")(found)})


@webhook.command("set")
@click.argument("url")
@as_json
def webhook_set(url: str, as_json: bool) -> None:
    """Send every event to URL. Another URL than before has another signing secret, which shows only this once."""
    made = service().fields("PUT", "/account/webhook", {"url": url}, having="url")
    if as_json:
        return show_json(made)
    if "secret" not in made:
        return click.echo("Events go there already; the signing secret stays as it is.")
    say(f"Events go to {made.get('url')}. They are signed with this secret, which shows only this once:")
    click.echo(made["secret"])


@webhook.command("clear")
@as_json
def webhook_clear(as_json: bool) -> None:
    """Send events nowhere, and forget the signing secret."""
    service().do("DELETE", "/account/webhook")
    if as_json:
        return show_json({"cleared": True})
    click.echo("Cleared: events are dropped until a webhook is set.")


@webhook.command("test")
@click.argument("event", metavar="TYPE", type=click.Choice(list(catalogue.SAMPLES)))
@as_json
def webhook_test(event: str, as_json: bool) -> None:
    """Send a sample of an event, marked as a sample.

    TYPE is deploy.succeeded, deploy.failed, app.crashed, app.unhealthy, app.recovered, domain.expiring or
    security.finding.
    """
    made = service().fields("POST", "/account/webhook/test", {"type": event})
    if as_json:
        return show_json(made)
    click.echo(f"A sample of {event} is on its way as {made.get('id')}; 'capsule deliveries list' tells how it went.")


# -- deliveries ----------------------------------------------------------------------------------------------


@click.group()
def deliveries() -> None:
    """What was sent to the webhook, and how it went."""


@deliveries.command("list")
@limit
@as_json
def deliveries_list(limit: int, as_json: bool) -> None:
    """The latest deliveries, newest first."""
    rows = service().rows("/account/deliveries", limit=limit)
    if as_json:
        return show_json(rows)
    show_table(
        rows,
        {
            "id": plain("id"),
            "event": plain("type"),
            "app": plain("app"),
            "at": time("at"),
            "took": took("durationMs"),
            "outcome": _outcome,
        },
        empty="No deliveries yet. Send a sample with: capsule webhook test deploy.succeeded",
    )


def _outcome(row: Row) -> Cell:
    outcome = word(row.get("outcome"))
    reason = f"{plain('error')(row)} {plain('status')(row)}".strip()
    return outcome.append(f" ({clean(reason)})") if reason and outcome.plain != "delivered" else outcome


@deliveries.command("redeliver")
@click.argument("delivery_id", metavar="ID")
@as_json
def deliveries_redeliver(delivery_id: str, as_json: bool) -> None:
    """Send an event again: the same id, a fresh timestamp and signature."""
    made = service().fields("POST", path("account", "deliveries", delivery_id, "redeliver"))
    if as_json:
        return show_json(made)
    click.echo(f"{delivery_id} is on its way again; 'capsule deliveries list' tells how it went.")
