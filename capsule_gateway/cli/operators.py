"""`capsule apps`, `accounts`, `audit` and `inference`: operators' commands, and the list of an account's apps.

`apps.py` has the commands for an account's own apps.
"""

from __future__ import annotations

import json
from typing import TextIO

import click

from capsule_gateway.cli.api_keys import show_created_key, show_keys
from capsule_gateway.cli.app_details import format_domain, format_health, show_own_app
from capsule_gateway.cli.completion import app_argument
from capsule_gateway.cli.service import WrongUsage, open_service, path
from capsule_gateway.cli.show import (
    Cell,
    Row,
    age_of,
    as_json,
    as_list,
    format_euro,
    print_note,
    show_fields,
    show_line,
    show_secret,
    show_table,
    state_of,
    text_of,
)
from capsule_gateway.cli.usage import show_usage, usage_options
from gateway.settings import PLANS

MAX_ROWS = 1_000  # of a list

plans = click.Choice(PLANS)
seen_reason = click.option("--reason", required=True, help="Why: 1 to 500 characters, which the account sees.")
reason = click.option("--reason", metavar="TEXT", help="Operators: why, for the audit trail; up to 500 characters.")
search = click.option("--search", help="Operators: list only entries with this text in a name, id or domain.")


@click.group()
def apps() -> None:
    """Create, change, list and delete your apps. Operators put, show and delete any app."""


@apps.command("list")
@click.option("--all", "everybody", is_flag=True, help="Operators: list the apps of all accounts.")
@search
@as_list
def apps_list(everybody: bool, search: str | None) -> None:
    """List the account's apps."""
    if everybody or search is not None:
        return _list_all_apps(search)
    rows = open_service().list_rows("/account/apps")
    show_table(
        rows,
        {
            "app": text_of("name"),
            "status": state_of("status"),
            "health": format_health,
            "findings": _format_findings,
            "address": text_of("url"),
            "custom domain": format_domain,
        },
        cut=["app"],
        less=["custom domain", "findings", "health"],
        empty="No apps yet. Create one with: capsule apps create NAME",
    )


def _list_all_apps(search: str | None) -> None:
    rows = _fetch_all_pages("/platform/apps", "apps", "after", search)
    show_table(
        rows,
        {
            "app": text_of("name"),
            "account": text_of("account"),
            "account name": text_of("accountName"),
            "status": state_of("status"),
            "health": format_health,
            "findings": _format_findings,
            "address": text_of("url"),
        },
        cut=["app", "account name"],
        less=["findings", "account name", "health", "account"],
        empty="No apps." if not search else f"No app or its account has {search!r} in a name, id or domain.",
    )


def _fetch_all_pages(path: str, name: str, cursor: str, search: str | None) -> list[Row]:
    """Returns the rows of all pages, at most `MAX_ROWS`. Prints a note if there are more."""
    service, rows, query = open_service(), list[Row](), {"search": search, "limit": 100}
    while len(rows) < MAX_ROWS:
        page = service.request_object("GET", path, query=query, having=name)
        rows += page[name]
        if not page.get("next"):
            return rows
        query[cursor] = page["next"]
    print_note(f"These are the first {MAX_ROWS:,}. Use --search to find others.")
    return rows


def _format_findings(row: Row) -> Cell:
    open_findings = row.get("openFindings")
    counts = open_findings.items() if isinstance(open_findings, dict) else ()
    return ", ".join(f"{count} {tier}" for tier, count in counts if count)


@apps.command("put")
@click.argument("app")
@click.argument("record", metavar="FILE", type=click.File("r"))
@reason
@as_json
def apps_put(app: str, record: TextIO, reason: str | None) -> None:
    """Operators: create or replace APP from a JSON file.

    FILE may be - for standard input. Fields that FILE omits are unset.
    """
    try:
        body = json.load(record)
    except ValueError as error:
        raise WrongUsage(f"{record.name} is not JSON: {error}") from None
    _show_app(open_service(reason).request_object("PUT", path("platform", "apps", app), body))


@apps.command("show")
@app_argument
@as_json
def apps_show(app: str) -> None:
    """Show APP: health, certificate, findings and crashes. Operators see its record, without the secret."""
    service = open_service()
    if service.is_account:
        return show_own_app(service, app)
    _show_app(service.request_object("GET", path("platform", "apps", app)))


@apps.command("suspend")
@click.argument("app", metavar="APP")
@seen_reason
@as_json
def apps_suspend(app: str, reason: str) -> None:
    """Operators: suspend APP. It answers no requests, and its deploys and start commands end."""
    _suspend("apps", app, reason, "Its account sees the reason.")


@apps.command("resume")
@click.argument("app", metavar="APP")
@reason
@as_json
def apps_resume(app: str, reason: str | None) -> None:
    """Operators: lift the suspension of APP."""
    _resume("apps", app, reason)


def _suspend(kind: str, target: str, reason: str, note: str) -> None:
    at = path("platform", kind, target, "suspension")
    record = open_service().request_object("PUT", at, {"reason": reason}, having="reason")
    show_line(record, f"{target} is suspended. {note}")


def _resume(kind: str, target: str, reason: str | None) -> None:
    open_service(reason).send("DELETE", path("platform", kind, target, "suspension"))
    show_line({"resumed": target}, f"The suspension of {target} is lifted.")


def _show_app(app: Row) -> None:
    show_fields(
        app,
        {
            "app": text_of("name"),
            "id": text_of("id"),
            "account": text_of("account"),
            "address": text_of("url"),
            "custom domain": format_domain,
            "user tokens": _format_fields(app, "auth"),
            "repository": _format_fields(app, "repository"),
            "build": _format_fields(app, "build"),
            "limits": _format_fields(app, "limits"),
            **({"suspended": _format_suspension(app)} if app.get("suspension") else {}),
            "created": age_of("createdAt"),
        },
    )


def _format_suspension(row: Row) -> str:
    suspension = row.get("suspension")
    return f"{age_of('at')(suspension)}: {text_of('reason')(suspension)}" if isinstance(suspension, dict) else "no"


def _format_fields(row: Row, name: str) -> str:
    value = row.get(name)
    if not isinstance(value, dict):
        return text_of(name)(row)
    return ", ".join(f"{key} {part}" for key, part in value.items() if part is not None)


@click.group()
def accounts() -> None:
    """Operators: list and create accounts and keys, change plans and caps, and suspend accounts."""


@accounts.command("list")
@search
@as_list
def accounts_list(search: str | None) -> None:
    """List all accounts, newest first."""
    rows = _fetch_all_pages("/platform/accounts", "accounts", "before", search)
    show_table(
        rows,
        {
            "account": text_of("id"),
            "name": text_of("name"),
            "plan": text_of("plan"),
            "apps": text_of("apps"),
            "spent today": lambda row: f"{format_euro(row.get('settled'))} of {format_euro(row.get('cap'))} EUR",
            "created": age_of("createdAt"),
        },
        prose="name",
        less=["created", "apps", "plan"],
        empty="No accounts." if not search else f"No account has {search!r} in its name or id.",
    )


@accounts.command("show")
@click.argument("account_id", metavar="ID")
@as_json
def accounts_show(account_id: str) -> None:
    """Show an account: its plan, spend, apps and API keys."""
    record = open_service().request_object("GET", path("platform", "accounts", account_id))
    spent = f"{format_euro(record.get('settled'))} of {format_euro(record.get('cap'))} EUR today"
    show_fields(
        record,
        {
            "account": text_of("id"),
            "name": text_of("name"),
            "plan": text_of("plan"),
            "spent": f"{spent}, {format_euro(record.get('reserved'))} reserved",
            "deploys": f"{record.get('deploysToday')} of {record.get('deploysPerDay')} today",
            "apps": ", ".join(text_of("name")(app) for app in record.get("appList", [])) or "none",
            "keys": ", ".join(f"{text_of('name')(key)} ({text_of('id')(key)})" for key in record.get("keys", [])),
            **({"suspended": _format_suspension(record)} if record.get("suspension") else {}),
            "created": age_of("createdAt"),
        },
    )


@accounts.command("create")
@click.argument("name")
@click.option("--plan", default="free", show_default=True, type=plans, help="Plan of the account.")
@reason
@as_json
def accounts_create(name: str, plan: str, reason: str | None) -> None:
    """Create an account. Its API key is shown only once."""
    record = open_service(reason).request_object(
        "POST", "/platform/accounts", {"name": name, "plan": plan}, having="apiKey"
    )
    note = f"Created account {record.get('id')} on the {plan} plan. This is its API key, which is shown only once:"
    show_secret(record, "apiKey", note)


@accounts.command("key")
@click.argument("account_id", metavar="ID")
@click.argument("name")
@reason
@as_json
def accounts_key(account_id: str, name: str, reason: str | None) -> None:
    """Create a key called NAME for an account holder who lost their key. It is shown only once."""
    created = open_service(reason).request_object(
        "POST", path("platform", "accounts", account_id, "keys"), {"name": name}, having="key"
    )
    show_created_key(created, account_id)


@accounts.command("plan")
@click.argument("account_id", metavar="ID")
@click.argument("plan", metavar="PLAN", type=plans)
@reason
@as_json
def accounts_plan(account_id: str, plan: str, reason: str | None) -> None:
    """Change the plan of an account."""
    record = open_service(reason).request_object("PATCH", path("platform", "accounts", account_id), {"plan": plan})
    show_line(record, f"{account_id} is now on the {plan} plan.")


@accounts.command("set")
@click.argument("account_id", metavar="ID")
@click.option("--daily-euro", required=True, metavar="X", help="Spending per UTC day, such as 0.50; none: the plan's.")
@reason
@as_json
def accounts_set(account_id: str, daily_euro: str, reason: str | None) -> None:
    """Set the daily cap of an account, in place of its plan's. 0 blocks all requests."""
    body = {"dailyEuro": None if daily_euro == "none" else daily_euro}
    record = open_service(reason).request_object("PATCH", path("platform", "accounts", account_id), body)
    cap = f"may spend {daily_euro} EUR per day" if body["dailyEuro"] is not None else "has its plan's cap again"
    show_line(record, f"{account_id} {cap}.")


@accounts.command("suspend")
@click.argument("account_id", metavar="ID")
@seen_reason
@as_json
def accounts_suspend(account_id: str, reason: str) -> None:
    """Suspend an account with all its apps. Its API keys can still read."""
    _suspend("accounts", account_id, reason, "It sees the reason.")


@accounts.command("resume")
@click.argument("account_id", metavar="ID")
@reason
@as_json
def accounts_resume(account_id: str, reason: str | None) -> None:
    """Lift the suspension of an account. Apps that are suspended themselves stay suspended."""
    _resume("accounts", account_id, reason)


@accounts.command("usage")
@click.argument("account_id", metavar="ID")
@usage_options
@as_list
def accounts_usage(account_id: str, days: int | None, group: str | None) -> None:
    """Show what an account used by hour or day. Times are in UTC."""
    show_usage(path("platform", "accounts", account_id, "usage"), days, group)


@accounts.command("keys")
@click.argument("account_id", metavar="ID")
@as_list
def accounts_keys(account_id: str) -> None:
    """List the API keys of an account."""
    show_keys(open_service().list_rows(path("platform", "accounts", account_id, "keys")))


@accounts.command("revoke-key")
@click.argument("account_id", metavar="ID")
@click.argument("key_id", metavar="KEY")
@reason
@as_json
def accounts_revoke_key(account_id: str, key_id: str, reason: str | None) -> None:
    """Revoke an API key of an account, even its only one."""
    open_service(reason).send("DELETE", path("platform", "accounts", account_id, "keys", key_id))
    show_line({"revoked": key_id}, f"Revoked {key_id}. Requests with it now get 401, and its sessions have ended.")


@click.command()
@click.option("--reports", is_flag=True, help="List reports of watchdogs, scanners and deploy engines instead.")
@click.option("--limit", default=20, show_default=True, type=click.IntRange(1, 200), help="Maximum number of rows.")
@as_list
def audit(reports: bool, limit: int) -> None:
    """Operators: list changes made with an operator token, newest first."""
    trail = "reports" if reports else "changes"
    rows = open_service().list_rows("/platform/audit", trail=trail, limit=limit)
    show_table(
        rows,
        {
            "when": text_of("at"),
            "operator": lambda row: f"{text_of('operator')(row)} ({text_of('token')(row)})",
            "action": lambda row: text_of("action")(row).replace("_", " "),
            "target": text_of("target"),
            "details": lambda row: _format_fields(row, "details"),
            "reason": text_of("reason"),
            "result": _format_result,
        },
        prose="details",
        cut=["operator", "reason"],
        less=["target", "operator"],
        empty="No reports yet." if reports else "No changes yet.",
    )


def _format_result(row: Row) -> Cell:
    status = row.get("status")
    if status is None:
        return "unknown"
    return "done" if status < 400 else f"refused: {status} {text_of('code')(row)}".rstrip()


@click.command()
@click.argument("action", type=click.Choice(["status", "on", "off", "approve", "unapprove"]))
@reason
@as_json
def inference(action: str, reason: str | None) -> None:
    """Operators: manage the inference switch and approval.

    \b
    status               show both
    on, off              turn the switch on or off
    approve, unapprove   give or withdraw the approval of production processing
    """
    changes = {
        "on": {"enabled": True},
        "off": {"enabled": False},
        "approve": {"approved": True},
        "unapprove": {"approved": False},
    }
    method = "GET" if action == "status" else "PUT"
    record = open_service(reason).request_object(
        method, "/platform/inference", changes.get(action), having="managedInferenceStatus"
    )
    show_fields(
        record,
        {
            "managed inference": _choose(record, "managedInference", "available", "unavailable"),
            "status": state_of("managedInferenceStatus"),
            "switch": _choose(record, "enabled", "on", "off"),
            "approval": _choose(record, "approved", "given", "missing"),
            "emergency file": _choose(record, "emergencyOff", "present: inference is off", "none"),
        },
    )


def _choose(row: Row, name: str, yes: str, no: str) -> str:
    return "unknown" if name not in row else yes if row[name] else no
