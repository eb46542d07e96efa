"""`capsule apps show APP` for account holders: shows the same facts as the app's page in the dashboard."""

from __future__ import annotations

from typing import Any

import click

from capsule_gateway.cli.cells import (
    Cell,
    Row,
    age_of,
    color_state,
    format_duration,
    nested_row,
    strip_controls,
    text_of,
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
    show_fields(app, _describe(app))
    if findings:
        _show_findings(findings, app)
    if crashes:
        _show_crashes(crashes)
    click.echo(f"\nTo list its deploys: capsule deploys list --app {strip_controls(name)}")


def _describe(app: Row) -> dict[str, Cell | None]:
    repository = nested_row(app, "repository")
    suspension = nested_row(app, "suspension")
    return {
        "app": text_of("name")(app),
        "suspended": text_of("reason")(suspension) if suspension else None,
        "address": text_of("url")(app),
        "custom domain": format_domain(app),
        "status": color_state(app.get("status")),
        "live deploy": text_of("liveDeploy")(app),
        "health": format_health(app),
        "since": age_of("healthSince")(app),
        "90 days": _format_uptime(app.get("healthDays")),
        "certificate": format_certificate(nested_row(app, "certificate")),
        "repository": f"{text_of('url')(repository)} at {text_of('branch')(repository)}" if repository else None,
        "created": age_of("createdAt")(app),
    }


def format_health(row: Row) -> Cell:
    return "" if row.get("health") == "unknown" else color_state(row.get("health"))


def format_domain(row: Row) -> Cell:
    domain = text_of("customDomain")(row)
    return domain if not domain or row.get("customDomainVerified") else f"{domain} (not verified)"


def format_certificate(certificate: Row) -> str:
    issuer = text_of("issuer")(certificate)
    return (
        f"until {text_of('expiresAt')(certificate)}{f', issued by {issuer}' if issuer else ''}" if certificate else ""
    )


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
    columns = {
        "tier": text_of("tier"),
        "cve": text_of("cve"),
        "package": text_of("component"),
        "severity": text_of("severity"),
        "fixed in": text_of("fixedIn"),
        "deadline": lambda row: text_of("deadlineAt")(row)[:10],
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
