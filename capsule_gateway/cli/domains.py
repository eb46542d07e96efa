"""`capsule domain`: an app's custom domain, and the DNS records that it needs."""

from __future__ import annotations

import click

from capsule_gateway.cli.app_details import format_certificate
from capsule_gateway.cli.completion import app_argument
from capsule_gateway.cli.service import ServiceRefusal, open_service, path
from capsule_gateway.cli.show import (
    Row,
    as_json,
    nested_row,
    show_fields,
    show_json,
    show_line,
    show_table,
    text_of,
    wants_json,
)

RECORD = {"type": text_of("type"), "name": text_of("name"), "value": text_of("value")}


@click.group()
def domain() -> None:
    """Serve an app at a domain of your own.

    Set the domain, create the records in its DNS, then verify it.
    """


@domain.command("show")
@app_argument
@as_json
def domain_show(app: str) -> None:
    """Show the custom domain of APP and the records that it needs."""
    _show(app, open_service().request_object("GET", _address(app), having="domain"))


@domain.command("set")
@app_argument
@click.argument("domain")
@as_json
def domain_set(app: str, domain: str) -> None:
    """Set the custom domain of APP to DOMAIN. A new domain is not served until it is verified."""
    _show(app, open_service().request_object("PUT", _address(app), {"domain": domain}, having="domain"))


@domain.command("verify")
@app_argument
@as_json
def domain_verify(app: str) -> None:
    """Ask the DNS now for the record that verifies the custom domain of APP."""
    answer = open_service().request_object("POST", f"{_address(app)}/verify", having="domain")
    if wants_json():
        show_json(answer)
    name, problem = text_of("domain")(answer), text_of("problem")(answer)
    if not answer.get("verified"):
        hint = f"To see the records that it needs, run: capsule domain show {app}"
        raise ServiceRefusal(f"{name} is not verified. {problem} {hint}")
    if not wants_json():
        click.echo(f"{name} is verified." + (f" {problem}" if problem else ""))


@domain.command("clear")
@app_argument
@as_json
def domain_clear(app: str) -> None:
    """Remove the custom domain of APP. It is no longer served there."""
    open_service().send("DELETE", _address(app))
    show_line({"cleared": app}, f"Removed the custom domain of {app}.")


def _address(app: str) -> str:
    return path("account", "apps", app, "domain")


def _show(app: str, answer: Row) -> None:
    if wants_json():
        return show_json(answer)
    show_fields(
        answer,
        {
            "app": app,
            "domain": text_of("domain"),
            "verified": "yes" if answer.get("verified") else "no",
            "certificate": format_certificate(nested_row(answer, "certificate")),
            "problem": text_of("problem"),
        },
    )
    click.echo("\nRecords for its DNS:")
    records = answer.get("records")
    show_table(records if isinstance(records, list) else [], RECORD, empty="none")
    if not answer.get("verified"):
        click.echo(f"\nCreate these records, then run: capsule domain verify {app}")
