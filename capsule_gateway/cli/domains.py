"""`capsule domain`: an app's custom domain, and the DNS records that it needs."""

import click

from capsule_gateway.cli.cells import Row, format_certificate, nested_row, text_of, texts
from capsule_gateway.cli.commands import Answer, Group, done
from capsule_gateway.cli.service import ServiceRefusal
from capsule_gateway.cli.show import show_fields, show_json, show_table, wants_json

ADDRESS = "/account/apps/{app}/domain"

domain = Group(
    "domain",
    help="Serve an app at a domain of your own.\n\nSet the domain, create the records in its DNS, then verify it.",
)


@domain.shows("show APP", f"GET {ADDRESS}", "domain")
def domain_show(answer: Row, app: str, **_: str) -> None:
    """Show the custom domain of APP and the records that it needs."""
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
    show_table(records if isinstance(records, list) else [], texts("type", "name", "value"), empty="none")
    if not answer.get("verified"):
        click.echo(f"\nCreate these records, then run: capsule domain verify {app}")


domain.sends(
    "set APP DOMAIN",
    f"PUT {ADDRESS} domain",
    "Set the custom domain of APP to DOMAIN. A new domain is not served until it is verified.",
    Answer("domain", domain_show),
)


def _show_verification(answer: Row, app: str) -> None:
    if wants_json():
        show_json(answer)
    name, problem = text_of("domain")(answer), text_of("problem")(answer)
    if not answer.get("verified"):
        hint = f"To see the records that it needs, run: capsule domain show {app}"
        raise ServiceRefusal(f"{name} is not verified. {problem} {hint}")
    if not wants_json():
        click.echo(f"{name} is verified." + (f" {problem}" if problem else ""))


domain.sends(
    "verify APP",
    f"POST {ADDRESS}/verify",
    "Ask the DNS now for the record that verifies the custom domain of APP.",
    Answer("domain", _show_verification),
)
domain.sends(
    "clear APP",
    f"DELETE {ADDRESS}",
    "Remove the custom domain of APP. It is no longer served there.",
    done("Removed the custom domain of {app}.", "cleared", "app"),
)
