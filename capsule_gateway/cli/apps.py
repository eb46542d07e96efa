"""`capsule apps`: creates, changes, lists and deletes an account's apps; operators put, show and suspend any app."""

import json
import sys
from typing import Any, TextIO

import click

from capsule_gateway.cli.arguments import RenamedOption, app_argument, reason
from capsule_gateway.cli.cells import (
    Cell,
    Row,
    age_of,
    format_certificate,
    format_count,
    format_duration,
    nested_row,
    state_of,
    strip_controls,
    text_of,
    texts,
)
from capsule_gateway.cli.commands import Group, done, sentence, value
from capsule_gateway.cli.operators import fetch_all_pages, format_fields, format_suspension, search, seen_reason
from capsule_gateway.cli.service import Service, ServiceRefusal, WrongUsage, open_service, path
from capsule_gateway.cli.show import (
    as_json,
    as_list,
    print_note,
    show_fields,
    show_json,
    show_line,
    show_table,
    wants_json,
)

SHOWN_FINDINGS = 20
CLEAR = "none"
# Options and the fields that they set.
CLAIMS = {"issuer": "issuer", "audience": "audience", "user_claim": "userClaim"}  # of the token
BACKEND = {"auth_method": "method", "user_field": "userField"}  # of calls to the app's backend
KINDS = {
    "auth_jwks": ("jwks", "url", CLAIMS),
    "auth_backend": ("backend", "url", BACKEND),
    "auth_secret": ("secret", "secret", CLAIMS),
}
AUTH_OPTIONS = KINDS.keys() | CLAIMS.keys() | BACKEND.keys()
BUILD_OPTIONS = {"command", "output", "start", "health"}


apps = Group(
    "apps",
    formerly={"delete": "remove"},
    help="Create, change, list and remove your apps. Operators put, show and remove any app.",
)


@apps.command("list")
@click.option("--all", "everybody", is_flag=True, help="Operators: list the apps of all accounts.")
@search
@as_list
def apps_list(everybody: bool, search: str | None) -> None:
    """List the account's apps. With the operator token, list those of all accounts."""
    health = {"status": state_of("status"), "health": _format_health, "findings": _format_findings}
    if everybody or search is not None or not open_service().is_account:
        return show_table(
            fetch_all_pages("/platform/apps", "apps", "after", search),
            texts(app="name", account="account", account_name="accountName") | health | texts(address="url"),
            cut=["app", "account name"],
            less=["findings", "account name", "health", "account"],
            empty="No apps." if not search else f"No app or its account has {search!r} in a name, id or domain.",
        )
    show_table(
        open_service().list_rows("/account/apps"),
        texts(app="name") | health | texts(address="url") | {"custom domain": _format_domain},
        cut=["app"],
        less=["custom domain", "findings", "health"],
        empty="No apps yet. Create one with: capsule apps create NAME",
    )


def _format_findings(row: Row) -> Cell:
    return ", ".join(f"{count} {tier}" for tier, count in nested_row(row, "openFindings").items() if count)


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
        return _show_own_app(service, app)
    _show_app(service.request_object("GET", path("platform", "apps", app)))


def _show_app(app: Row) -> None:
    show_fields(
        app,
        {
            **texts(app="name", id="id", account="account", address="url"),
            "custom domain": _format_domain,
            "user tokens": format_fields(app, "auth"),
            **{name: format_fields(app, name) for name in ("repository", "build", "limits")},
            "suspended": format_suspension,
            "created": age_of("createdAt"),
        },
    )


def _show_own_app(service: Service, name: str) -> None:
    at = path("account", "apps", name)
    app = service.request_object("GET", at)
    findings, crashes = service.list_rows(f"{at}/findings", limit=SHOWN_FINDINGS), service.list_rows(f"{at}/crashes")
    if wants_json():
        return show_json({**app, "findings": findings, "crashes": crashes})
    repository = nested_row(app, "repository")
    branch = text_of("branch")(repository) or "its default branch"
    show_fields(
        app,
        {
            "app": text_of("name"),
            "suspended": text_of("reason")(nested_row(app, "suspension")),
            "address": text_of("url"),
            "custom domain": _format_domain,
            "status": state_of("status"),
            "live deploy": text_of("liveDeploy"),
            "health": _format_health,
            "since": age_of("healthSince"),
            "90 days": _format_uptime(app.get("healthDays")),
            "certificate": format_certificate(nested_row(app, "certificate")),
            "repository": f"{text_of('url')(repository)} at {branch}" if repository else "",
            "created": age_of("createdAt"),
        },
    )
    if findings:
        _show_findings(findings, app)
    if crashes:
        _show_crashes(crashes)
    click.echo(f"\nTo list its deploys: capsule deploys list --app {strip_controls(name)}")


def _format_health(row: Row) -> Cell:
    return "" if row.get("health") == "unknown" else state_of("health")(row)


def _format_domain(row: Row) -> Cell:
    return ", ".join(
        text_of("domain")(domain) + ("" if domain.get("verified") else " (not verified)")
        for domain in row.get("domains") or []
    )


def _format_uptime(days: Any) -> str:
    probed = [day for day in days if isinstance(day, dict) and day.get("downMs") is not None] if days else []
    if not probed:
        return ""
    down, outages = sum(day["downMs"] for day in probed), sum(day["outages"] for day in probed)
    monitored = f"{format_count(len(probed), 'day')} monitored"
    if not down:
        return monitored
    # An outage counts on its first day, which may be more than 90 days ago.
    often = f" in {format_count(outages, 'outage')}" if outages else ""
    return f"{monitored}, down {format_duration(down)}{often}"


def _show_findings(findings: list[dict[str, Any]], app: Row) -> None:
    total = sum(count for count in nested_row(app, "openFindings").values() if isinstance(count, int))
    more = f" (the {len(findings)} most urgent)" if total > len(findings) else ""
    click.echo(f"\n{format_count(total, 'open security finding')}{more}:")
    columns = texts(tier="tier", cve="cve", package="component", severity="severity", fixed_in="fixedIn") | {
        "deadline": lambda row: text_of("deadlineAt")(row)[:10]
    }
    show_table(findings, columns, empty="")


def _show_crashes(crashes: list[dict[str, Any]]) -> None:
    click.echo("\nCrashes, newest first:")
    show_table(crashes, {"at": text_of("at"), "ended": _format_ending}, empty="")
    last = crashes[0].get("lines")
    if isinstance(last, list) and last:
        click.echo("\nLast output before the newest crash:")
        for line in last:
            click.echo(f"  {strip_controls(str(line))}")


def _format_ending(crash: Row) -> str:
    code = crash.get("exitCode")
    reason = "out of memory" if crash.get("reason") == "oom" else "process exited"
    return reason if code is None else f"{reason}, exit code {code}"


any_app_argument = click.argument("app", metavar="APP")
apps.sends(
    "suspend",
    "PUT /platform/apps/{app}/suspension reason=seen_reason",
    "Operators: suspend APP. It answers no requests, and its deploys and start commands end.",
    sentence("{app} is suspended. Its account sees the reason.", "reason"),
    any_app_argument,
    seen_reason,
)
apps.sends(
    "resume",
    "DELETE /platform/apps/{app}/suspension",
    "Operators: lift the suspension of APP.",
    done("The suspension of {app} is lifted.", "resumed", "app"),
    any_app_argument,
    reason,
)
apps.sends(
    "create NAME",
    "POST /account/apps name",
    "Create an app called NAME, and print its address.\n\nThe account's plan limits the number of apps.",
    value("url", "Created {name}. Publish a folder with: capsule deploys publish {name} DIR"),
)


@apps.command("set")
@app_argument
@click.option(
    "--auth-jwks", metavar="URL", help="Verify users' tokens with the key set at URL, or at a path of the app."
)
@click.option("--auth-backend", metavar="URL", help="Verify users' tokens with a call to the app's backend at URL.")
@click.option("--auth-secret", is_flag=True, help="Verify users' tokens with a shared secret, read from a prompt.")
@click.option(
    "--auth-method", type=click.Choice(["GET", "POST"]), help="Method of calls to the backend. The default is GET."
)
@click.option("--user-field", metavar="PATH", help="Path of the user's id in the backend's answer, such as record.id.")
@click.option(
    "--user-claim", metavar="CLAIM", help="Claim of the token that holds the user's id. The default is 'sub'."
)
@click.option("--issuer", metavar="ISS", help="Accept only tokens with this 'iss'.")
@click.option("--audience", metavar="AUD", help="Accept only tokens with this 'aud'.")
@click.option("--repository", metavar="URL", help="Build from the git repository at URL; - prompts for the address.")
@click.option("--branch", help="Branch to follow; 'none' follows the repository's default branch.")
@click.option("--build", "command", metavar="COMMAND", help="Command that builds the app.")
@click.option(
    "--output-dir",
    "output",
    cls=RenamedOption,
    formerly=["--output"],
    metavar="DIR",
    help="Folder to serve, inside the source.",
)
@click.option("--start", metavar="COMMAND", help="Command that runs the app. Without it, files are served.")
@click.option("--health", metavar="PATH", help="Path that answers with 2xx or 3xx while the app works.")
@as_json
def apps_set(app: str, **options: Any) -> None:
    """Change how APP verifies tokens and how it is built. The value 'none' clears an option.

    Omitted options keep their value. Without options, the command shows the settings. It reads secrets from a prompt
    or standard input, never from the command line: --auth-secret, and --repository - for an address with a password.
    """
    service, address = open_service(), path("account", "apps", app)
    settings = service.request_object("GET", f"{address}/settings", having="auth")
    given = {name: value for name, value in options.items() if value not in (None, False)}
    if given:
        settings = service.request_object("PATCH", address, _collect_changes(given, settings), having="auth")
    show_fields(
        settings,
        {
            "user tokens": format_fields(settings, "auth"),
            "repository": format_fields(settings, "repository") or "none",
            "build": format_fields(settings, "build") or "none: the source is served as it is",
            "check": _format_check(nested_row(settings, "authCheck")),
        },
    )


def _format_check(check: Row) -> str:
    """Returns the result of the check of the app's verification of tokens, or '' if there was none."""
    if not check:
        return ""
    if not check.get("ok"):
        return f"saved, but tokens cannot be verified yet: {text_of('problem')(check)}"
    keys, algorithms = check.get("keys"), ", ".join(map(str, check.get("algorithms") or ()))
    return f"{format_count(keys, 'key')}: {algorithms}" if keys else "passed"


@apps.command("check-token")
@app_argument
@as_json
def apps_check_token(app: str) -> None:
    """Check a token of a user of APP, and explain why it would be refused.

    The command reads the token from a prompt or standard input. The service keeps nothing of it.
    """
    token = _read_secret("Token")
    if not token:
        raise WrongUsage("no token on standard input")
    address = path("account", "apps", app, "token-check")
    answer = open_service().request_object("POST", address, {"token": token}, having="valid")
    claims = {f"claim {name}": _format_claim(value) for name, value in nested_row(answer, "claims").items()}
    show_fields(answer, {"user": text_of("user"), **claims})
    if not answer.get("valid"):
        raise ServiceRefusal(f"the token is not valid: {text_of('reason')(answer)}")


def _format_claim(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _collect_changes(given: dict[str, Any], settings: Row) -> dict[str, Any]:
    """Returns the fields of the record that the options change. Raises WrongUsage."""
    changes: dict[str, Any] = {}
    if given.keys() & AUTH_OPTIONS:
        changes["auth"] = _change_auth(given, settings["auth"])
    if given.keys() & {"repository", "branch"}:
        changes["repository"] = _change_repository(given, settings.get("repository"))
    if given.keys() & BUILD_OPTIONS:
        merged = dict(settings.get("build") or {}) | _pick(given, *BUILD_OPTIONS)
        after = {name: value for name, value in merged.items() if value not in (CLEAR, None)}
        changes["build"] = after or None
    return changes


def _change_auth(given: dict[str, Any], before: Row) -> dict[str, Any] | None:
    kinds = sorted(KINDS.keys() & given.keys())
    if len(kinds) > 1:
        raise WrongUsage("give only one of --auth-jwks, --auth-backend and --auth-secret")
    if kinds and given[kinds[0]] == CLEAR:
        return None
    auth = dict(before)
    if kinds:
        kind, field, kept = KINDS[kinds[0]]
        value = _read_secret("Secret that signs the tokens") if kind == "secret" else given[kinds[0]]
        auth = {**_pick(before, *kept.values()), "kind": kind, field: value}
    elif auth.get("kind") == "secret":
        raise WrongUsage("also give --auth-secret, because the stored secret cannot be read")
    claims, calls = _rename(given, CLAIMS), _rename(given, BACKEND)
    if claims and auth["kind"] == "backend":
        raise WrongUsage(
            "--issuer, --audience and --user-claim apply to --auth-jwks and --auth-secret; a backend checks them itself"
        )
    if calls and auth["kind"] != "backend":
        raise WrongUsage("--auth-method and --user-field apply to --auth-backend")
    return {name: value for name, value in (auth | claims | calls).items() if value != CLEAR}


def _rename(given: dict[str, Any], fields: dict[str, str]) -> dict[str, Any]:
    return {field: given[option] for option, field in fields.items() if option in given}


def _pick(fields: Row, *names: str) -> dict[str, Any]:
    return {name: fields[name] for name in names if name in fields}


def _change_repository(given: dict[str, Any], before: Row | None) -> dict[str, Any] | None:
    url = given.get("repository", before and before["url"])
    if url == CLEAR:
        return None
    if url is None:
        raise WrongUsage("also give --repository: the app has no repository")
    if "@" in url.partition("://")[2].partition("/")[0]:
        raise WrongUsage(
            "keep the password off the command line: give --repository - and type the address at the prompt"
        )
    if url == "-":
        url = _read_secret("Address of the repository, such as https://user:token@git.example.com/app.git")
    known = before["branch"] if before else None
    branch = given.get("branch", known)
    return {"url": url} if branch in (None, CLEAR) else {"url": url, "branch": branch}


def _read_secret(prompt: str) -> str:
    if sys.stdin.isatty():
        typed: str = click.prompt(prompt, hide_input=True, err=True)
        return typed
    return sys.stdin.readline().strip()


@apps.command("remove")
@click.argument("app")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@reason
@as_json
def apps_remove(app: str, yes: bool, reason: str | None) -> None:
    """Delete APP with its hooks, variables and sources. Operators can delete any account's app.

    The command asks you to type the app's name, unless you give --yes.
    """
    service = open_service(reason)
    if not yes:
        if not sys.stdin.isatty():
            raise WrongUsage("standard input is not a terminal: add --yes to delete the app")
        print_note(f"This deletes {strip_controls(app)}, and its hooks, variables and sources. It cannot be undone.")
        if click.prompt("Name of the app", err=True) != app:
            raise WrongUsage("the name does not match; nothing was deleted")
    try:
        service.send("DELETE", path("account", "apps", app))
    except ServiceRefusal as refused:
        if refused.status != 401:
            raise
        service.send("DELETE", path("platform", "apps", app))  # the key may be the operator token
    show_line({"deleted": app}, f"Deleted {strip_controls(app)}. Its address, hooks, variables and sources are gone.")
