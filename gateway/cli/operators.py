"""`capsule apps`, `accounts`, `inference`: the operators' commands, and the list of an account's apps."""

from __future__ import annotations

import json
from typing import TextIO

import click

from gateway.cli.service import Misused, path, service
from gateway.cli.show import Cell, Row, as_json, plain, say, show_fields, show_json, show_table, state, time, word
from gateway.settings import PLANS

plans = click.Choice(PLANS)


@click.group()
def apps() -> None:
    """The account's apps; operators: put, show and delete any."""


@apps.command("list")
@as_json
def apps_list(as_json: bool) -> None:
    """The account's apps."""
    rows = service().rows("/account/apps")
    if as_json:
        return show_json(rows)
    show_table(
        rows,
        {
            "app": plain("name"),
            "status": state("status"),
            "health": _health,
            "findings": _findings,
            "address": plain("url"),
            "custom domain": _domain,
        },
        empty="No apps. The service's operator adds them to the account.",
    )


def _health(row: Row) -> Cell:
    return "" if row.get("health") == "unknown" else word(row.get("health"))


def _findings(row: Row) -> Cell:
    found = row.get("openFindings")
    counts = found.items() if isinstance(found, dict) else ()
    return ", ".join(f"{count} {tier}" for tier, count in counts if count)


def _domain(row: Row) -> Cell:
    domain = plain("customDomain")(row)
    return domain if not domain or row.get("customDomainVerified") else f"{domain} (not verified)"


@apps.command("put")
@click.argument("app")
@click.argument("record", metavar="FILE", type=click.File("r"))
@as_json
def apps_put(app: str, record: TextIO, as_json: bool) -> None:
    """Operators: create or replace APP from JSON.

    FILE may be - for standard input. What it leaves out is unset.
    """
    try:
        body = json.load(record)
    except ValueError as error:
        raise Misused(f"{record.name} is not JSON: {error}") from None
    _show_app(service().fields("PUT", path("platform", "apps", app), body), as_json)


@apps.command("show")
@click.argument("app")
@as_json
def apps_show(app: str, as_json: bool) -> None:
    """Operators: APP's record, without its secret."""
    _show_app(service().fields("GET", path("platform", "apps", app)), as_json)


def _show_app(app: Row, as_json: bool) -> None:
    if as_json:
        return show_json(app)
    show_fields(
        {
            "app": plain("name")(app),
            "id": plain("id")(app),
            "account": plain("account")(app),
            "address": plain("url")(app),
            "custom domain": _domain(app),
            "users": _words(app, "auth"),
            "repository": _words(app, "repository"),
            "build": _words(app, "build"),
            "created": time("createdAt")(app),
        }
    )


def _words(row: Row, name: str) -> str:
    value = row.get(name)
    if not isinstance(value, dict):
        return plain(name)(row)
    return ", ".join(f"{key} {part}" for key, part in value.items() if part is not None)


@apps.command("delete")
@click.argument("app")
@as_json
def apps_delete(app: str, as_json: bool) -> None:
    """Operators: delete APP and its stored sources."""
    service().do("DELETE", path("platform", "apps", app))
    if as_json:
        return show_json({"deleted": app})
    click.echo(f"Deleted {app} and its stored sources.")


@click.group()
def accounts() -> None:
    """Operators: accounts."""


@accounts.command("create")
@click.argument("name")
@click.option("--plan", default="free", show_default=True, type=plans)
@as_json
def accounts_create(name: str, plan: str, as_json: bool) -> None:
    """Create an account. Its API key shows only this once."""
    made = service().fields("POST", "/platform/accounts", {"name": name, "plan": plan}, having="apiKey")
    if as_json:
        return show_json(made)
    say(f"Account {made.get('id')} on the {plan} plan. This is its API key, which shows only this once:")
    click.echo(made["apiKey"])


@accounts.command("plan")
@click.argument("account_id", metavar="ID")
@click.argument("plan", metavar="PLAN", type=plans)
@as_json
def accounts_plan(account_id: str, plan: str, as_json: bool) -> None:
    """Change an account's plan."""
    changed = service().fields("PATCH", path("platform", "accounts", account_id), {"plan": plan})
    if as_json:
        return show_json(changed)
    click.echo(f"{account_id} is on the {plan} plan.")


@click.command()
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
    method = "GET" if action == "status" else "PUT"
    found = service().fields(method, "/platform/inference", changes.get(action), having="managedInferenceStatus")
    if as_json:
        return show_json(found)
    show_fields(
        {
            "managed inference": _either(found, "managedInference", "available", "unavailable"),
            "status": word(found.get("managedInferenceStatus")),
            "switch": _either(found, "enabled", "on", "off"),
            "approval": _either(found, "approved", "given", "missing"),
            "emergency file": _either(found, "emergencyOff", "there: nothing is sent", "none"),
        }
    )


def _either(row: Row, name: str, yes: str, no: str) -> str:
    return "unknown" if name not in row else yes if row[name] else no
