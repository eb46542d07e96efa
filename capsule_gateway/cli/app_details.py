"""`capsule apps show APP` for account holders: shows the same facts as the app's page in the dashboard."""

from typing import Any

import click

from capsule_gateway.cli.cells import (
    Cell,
    Row,
    age_of,
    color_state,
    format_duration,
    nested_row,
    state_of,
    strip_controls,
    text_of,
    texts,
)
from capsule_gateway.cli.service import Service, path
from capsule_gateway.cli.show import show_fields, show_json, show_table, wants_json

SHOWN_FINDINGS = 20


def show_own_app(service: Service, name: str) -> None:
    at = path("account", "apps", name)
    app = service.request_object("GET", at)
    findings, crashes = service.list_rows(f"{at}/findings", limit=SHOWN_FINDINGS), service.list_rows(f"{at}/crashes")
    if wants_json():
        return show_json({**app, "findings": findings, "crashes": crashes})
    repository = nested_row(app, "repository")
    show_fields(
        app,
        {
            "app": text_of("name"),
            "suspended": text_of("reason")(nested_row(app, "suspension")),
            "address": text_of("url"),
            "custom domain": format_domain,
            "status": state_of("status"),
            "live deploy": text_of("liveDeploy"),
            "health": format_health,
            "since": age_of("healthSince"),
            "90 days": _format_uptime(app.get("healthDays")),
            "certificate": format_certificate(nested_row(app, "certificate")),
            "repository": f"{text_of('url')(repository)} at {text_of('branch')(repository)}" if repository else "",
            "created": age_of("createdAt"),
        },
    )
    if findings:
        _show_findings(findings, app)
    if crashes:
        _show_crashes(crashes)
    click.echo(f"\nTo list its deploys: capsule deploys list --app {strip_controls(name)}")


def format_health(row: Row) -> Cell:
    return "" if row.get("health") == "unknown" else color_state(row.get("health"))


def format_domain(row: Row) -> Cell:
    domain = text_of("customDomain")(row)
    return domain if not domain or row.get("customDomainVerified") else f"{domain} (not verified)"


def format_certificate(certificate: Row) -> str:
    issuer = f", issued by {certificate['issuer']}" if certificate.get("issuer") else ""
    return f"until {text_of('expiresAt')(certificate)}{issuer}" if certificate else ""


def _format_uptime(days: Any) -> str:
    probed = [day for day in days if isinstance(day, dict) and day.get("downMs") is not None] if days else []
    if not probed:
        return ""
    down, outages = sum(day["downMs"] for day in probed), sum(day["outages"] for day in probed)
    monitored = f"{len(probed)} day{'s' if len(probed) > 1 else ''} monitored"
    if not down:
        return monitored
    # An outage counts on its first day, which may be more than 90 days ago.
    often = f" in {outages} outage{'s' if outages > 1 else ''}" if outages else ""
    return f"{monitored}, down {format_duration(down)}{often}"


def _show_findings(findings: list[dict[str, Any]], app: Row) -> None:
    total = sum(count for count in nested_row(app, "openFindings").values() if isinstance(count, int))
    more = f" (the {len(findings)} most urgent)" if total > len(findings) else ""
    click.echo(f"\n{total} open security finding{'s' if total > 1 else ''}{more}:")
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
