"""`capsule accounts`, `audit`, `inference`, `prices` and `providers`: operators' commands."""

from pathlib import Path
from typing import Any

import click

from capsule_gateway.cli.api_keys import KEYS
from capsule_gateway.cli.arguments import NumberType, account_argument, reason
from capsule_gateway.cli.cells import (
    Cell,
    Row,
    age_of,
    format_euro,
    format_spending,
    nested_row,
    state_of,
    strip_controls,
    text_of,
    texts,
)
from capsule_gateway.cli.commands import Group, done, sentence, value
from capsule_gateway.cli.service import open_service, path
from capsule_gateway.cli.show import as_json, as_list, print_doubts, print_note, show_fields, show_line, show_table
from capsule_gateway.cli.usage import show_usage, usage_options
from gateway.ids import now_iso
from gateway.settings import PLANS, BadSettings, Settings, find_doubts, load, read_environment
from gateway.settings.prices import Tariff

PER_MILLION = 1_000_000  # tokens
MAX_ROWS = 1_000  # of a list

plans = click.Choice(PLANS)
seen_reason = click.option(
    "--reason", "seen_reason", required=True, help="Why: 1 to 500 characters, which the account sees."
)
search = click.option("--search", help="Operators: list only entries with this text in a name, id or domain.")


def fetch_all_pages(path: str, name: str, cursor: str, search: str | None) -> list[Row]:
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


def format_suspension(row: Row) -> str:
    suspension = nested_row(row, "suspension")
    return f"{age_of('at')(suspension)}: {text_of('reason')(suspension)}" if suspension else ""


def format_fields(row: Row, name: str) -> str:
    value = row.get(name)
    if not isinstance(value, dict):
        return text_of(name)(row)
    return ", ".join(f"{key} {part}" for key, part in value.items() if part is not None)


ACCOUNT = "/platform/accounts/{account}"

accounts = Group(
    "accounts",
    formerly={"key": "create-key", "revoke-key": "remove-key", "delete": "remove"},
    help="Operators: list and create accounts and keys, change plans and caps, and suspend accounts.",
)


@accounts.command("list")
@search
@as_list
def accounts_list(search: str | None) -> None:
    """List all accounts, newest first."""
    show_table(
        fetch_all_pages("/platform/accounts", "accounts", "before", search),
        {
            **texts(account="id", name="name", plan="plan", apps="apps"),
            "spent today": format_spending,
            "created": age_of("createdAt"),
        },
        prose="name",
        less=["created", "apps", "plan"],
        empty="No accounts." if not search else f"No account has {search!r} in its name or id.",
    )


@accounts.shows("show ACCOUNT", f"GET {ACCOUNT}")
def accounts_show(record: Row, account: str) -> None:
    """Show an account: its plan, spend, apps, API keys and members."""
    show_fields(
        record,
        {
            **texts(account="id", name="name", plan="plan"),
            "spent": f"{format_spending(record)} today, {format_euro(record.get('reserved'))} reserved",
            "deploys": f"{record.get('deploysToday')} of {record.get('deploysPerDay')} today",
            "apps": ", ".join(text_of("name")(app) for app in record.get("appList", [])) or "none",
            "keys": ", ".join(f"{text_of('name')(key)} ({text_of('id')(key)})" for key in record.get("keys", [])),
            "members": ", ".join(map(_format_member, record.get("members", []))) or "none",
            "suspended": format_suspension,
            "created": age_of("createdAt"),
        },
    )


def _format_member(row: Row) -> str:
    invited = ", invited" if row.get("state") == "invited" else ""
    return f"{text_of('email')(row)} ({text_of('role')(row)}{invited})"


accounts.sends(
    "create NAME",
    "POST /platform/accounts name plan",
    "Create an account. Its API key is shown only once.",
    value("apiKey", "Created account {id} on the {plan} plan. This is its API key, which is shown only once:"),
    click.option("--plan", default="free", show_default=True, type=plans, help="Plan of the account."),
    reason,
)
accounts.sends(
    "create-key ACCOUNT NAME --reason",
    f"POST {ACCOUNT}/keys name",
    "Create a key called NAME for an account holder who lost their key. It is shown only once.",
    value("key", "Created API key {id} for {account}. Keep it secret. It is shown only once:"),
)
accounts.sends(
    "plan ACCOUNT",
    f"PATCH {ACCOUNT} plan",
    "Change the plan of an account.",
    sentence("{account} is now on the {plan} plan."),
    click.argument("plan", metavar="PLAN", type=plans),
    reason,
)


@accounts.command("set")
@account_argument
@click.option(
    "--daily-euro", required=True, metavar="X", help="Euro per UTC day, such as 0.50, or none for the plan's cap."
)
@reason
@as_json
def accounts_set(account: str, daily_euro: str, reason: str | None) -> None:
    """Set the daily cap of an account, in place of its plan's. 0 blocks all requests."""
    body = {"dailyEuro": None if daily_euro == "none" else daily_euro}
    record = open_service(reason).request_object("PATCH", path("platform", "accounts", account), body)
    cap = f"may spend {daily_euro} EUR per day" if body["dailyEuro"] is not None else "has its plan's cap again"
    show_line(record, f"{account} {cap}.")


accounts.sends(
    "suspend ACCOUNT",
    f"PUT {ACCOUNT}/suspension reason=seen_reason",
    "Suspend an account with all its apps. It can still read and change settings, but publishes nothing.",
    sentence("{account} is suspended. It sees the reason.", "reason"),
    seen_reason,
)
accounts.sends(
    "resume ACCOUNT --reason",
    f"DELETE {ACCOUNT}/suspension",
    "Lift the suspension of an account. Apps that are suspended themselves stay suspended.",
    done("The suspension of {account} is lifted.", "resumed", "account"),
)
accounts.sends(
    "remove ACCOUNT --reason",
    f"DELETE {ACCOUNT}?now={{now}}",
    "Delete an account with all apps and data, after a grace period in which its holder can keep it.",
    sentence("{account} is stopped, and will be deleted at {deletesAt}.", "deletesAt"),
    click.option("--now", is_flag=True, help="Delete it at once."),
)
accounts.lists("keys ACCOUNT", f"{ACCOUNT}/keys", "List the API keys of an account.", **KEYS)
accounts.sends(
    "remove-key ACCOUNT KEY --reason",
    f"DELETE {ACCOUNT}/keys/{{key}}",
    "Revoke an API key of an account, even its only one.",
    done("Revoked {key}. Requests with it now get 401, and its sessions have ended.", "revoked", "key"),
)


@accounts.command("usage")
@account_argument
@usage_options
@as_list
def accounts_usage(account: str, days: int | None, group: str | None) -> None:
    """Show what an account used by hour or day. Times are in UTC."""
    show_usage(path("platform", "accounts", account, "usage"), days, group)


def _format_operator(row: Row) -> str:
    name, token = text_of("operator")(row), text_of("token")(row)
    return f"{name} ({token})" if token else name  # an operator who signed in has no token


@click.command()
@click.option("--reports", is_flag=True, help="Operators: list reports of watchdogs and deploy engines instead.")
@click.option("--actor", metavar="WHO", help="Only changes by this key (its id), member or operator.")
@click.option("--action", metavar="NAME", help="Only this action, such as create_key.")
@click.option("--limit", default=20, show_default=True, type=NumberType(1, 200), help="Maximum number of rows.")
@as_list
def audit(reports: bool, actor: str | None, action: str | None, limit: int) -> None:
    """List the changes of the account, newest first. With an operator token: the changes of operators."""
    service = open_service()
    action = action and action.lower().replace(" ", "_")  # as the table shows it
    if service.is_account:
        return _show_changes(service.list_rows("/account/audit", actor=actor, action=action, limit=limit))
    trail = "reports" if reports else "changes"
    rows = service.list_rows("/platform/audit", trail=trail, operator=actor, action=action, limit=limit)
    show_table(
        rows,
        {
            "when": text_of("at"),
            "operator": _format_operator,
            "action": _format_action,
            "target": text_of("target"),
            "details": lambda row: format_fields(row, "details"),
            "reason": text_of("reason"),
            "result": _format_result,
        },
        prose="details",
        cut=["operator", "reason"],
        less=["target", "operator"],
        empty="No reports yet." if reports else "No changes yet.",
    )


def _show_changes(rows: list[dict[str, Any]]) -> None:
    columns = {"when": text_of("at"), "who": text_of("who"), "by": text_of("by"), "action": _format_repeated}
    show_table(rows, columns | texts("target"), cut=["who"], less=["by"], empty="No changes yet.")


def _format_action(row: Row) -> str:
    return text_of("action")(row).replace("_", " ")


def _format_repeated(row: Row) -> str:
    action, count = _format_action(row), row.get("count", 1)
    return f"{action} ({count} times)" if count > 1 else action


def _format_result(row: Row) -> Cell:
    status = row.get("status")
    if status is None:
        return "unknown"
    return "done" if status < 400 else f"refused: {status} {text_of('code')(row)}".rstrip()


@click.command()
@click.argument("action", metavar="ACTION", type=click.Choice(["status", "on", "off", "approve", "unapprove"]))
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


providers = Group("providers", help="Operators: list, enable and disable the model providers, and check their file.")


@providers.command("list")
@as_list
def providers_list() -> None:
    """List the model providers, the preferred one first."""
    report = open_service().request_object("GET", "/platform/inference", having="providers")
    show_table(
        report["providers"],
        {
            **texts(provider="name", region="region"),
            "status": _format_status,
            "requests": _format_permits,
            "waiting": lambda row: text_of("waiting")(nested_row(row, "permits")),
            **texts(attempts="attempts", failovers="failovers"),
            "models": lambda row: ", ".join(map(str, row.get("models", []))),
        },
        prose="models",
        less=["models", "region"],
        empty="No providers.",
    )


def _format_status(row: Row) -> Cell:
    if not row.get("enabled"):
        return "disabled"
    status, until = state_of("status")(row), row.get("passedOverUntil")
    return status.append(strip_controls(f", passed over until {until}")) if until else status


def _format_permits(row: Row) -> Cell:
    permits = nested_row(row, "permits")
    limit = permits.get("limit")
    return f"{permits.get('used')} of {limit}" if limit else f"{permits.get('used')}"


PROVIDER = "PUT /platform/providers/{name}"

providers.sends(
    "enable NAME --reason",
    PROVIDER,
    "Let requests go to a model provider again.",
    sentence("Requests may go to {name} again.", "name"),
    fixed={"enabled": True},
)
providers.sends(
    "disable NAME --reason",
    PROVIDER,
    "Send a model provider no new requests. Streams that run there go on.",
    sentence("{name} gets no new requests. Streams that run there go on.", "name"),
    fixed={"enabled": False},
)


@providers.command("check")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@as_json
def providers_check(file: Path) -> None:
    """Check a providers file, as the start of the gateway does. It needs no service."""
    settings = _check_file("GATEWAY_PROVIDERS_FILE", file, "GATEWAY_REGIONS", "GATEWAY_PRICES_FILE")
    print_doubts(find_doubts(settings))
    lines = [f"{each.name}: in {each.region}, serves {', '.join(each.models)}" for each in settings.providers]
    show_line({"providers": [each.name for each in settings.providers]}, "\n".join(lines))


prices = Group("prices", help="Operators: check the file with the prices of the models.")


@prices.command("check")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@as_list
def prices_check(file: Path) -> None:
    """Check a prices file, as the start of the gateway does, and list the prices. It needs no service."""
    tariffs = _check_file("GATEWAY_PRICES_FILE", file).tariffs
    before = [Tariff({}), *tariffs]
    show_table(
        [
            {
                "model": model,
                "input": price.input * PER_MILLION,
                "output": price.output * PER_MILLION,
                "since": now_iso(tariff.since / 1000) if tariff.since else None,
            }
            for tariff, previous in zip(tariffs, before, strict=False)
            for model, price in tariff.prices.items()
            if previous.prices.get(model) != price
        ],
        {
            **texts(model="model"),
            "input per million": lambda row: f"{format_euro(row['input'])} EUR",
            "output per million": lambda row: f"{format_euro(row['output'])} EUR",
            "since": lambda row: row["since"] or "",
        },
        empty="No prices.",
    )


def _check_file(name: str, file: Path, *others: str) -> Settings:
    """Returns the settings with the file and `others`; the rest may be missing or wrong where the file is written."""
    try:
        environ = read_environment()
        return load({name: str(file), **{other: environ.get(other, "") for other in others}})
    except BadSettings as error:
        raise click.ClickException(str(error)) from None


def _choose(row: Row, name: str, yes: str, no: str) -> str:
    return "unknown" if name not in row else yes if row[name] else no
