"""`capsule domains`: an app's custom domains, and the DNS records that they need. `capsule domain`: the primary one."""

import click

from capsule_gateway.cli.cells import Row, format_certificate, nested_row, text_of, texts
from capsule_gateway.cli.commands import Answer, Group, done
from capsule_gateway.cli.service import ServiceRefusal
from capsule_gateway.cli.show import show_fields, show_json, show_table, wants_json

ADDRESS = "/account/apps/{app}/domain"


def _format_verified(row: Row) -> str:
    return "yes" if row.get("verified") else "no"


def _format_primary(row: Row) -> str:
    return "yes" if row.get("primary") else ""


def _show_domain(answer: Row, app: str, verify: str) -> None:
    """Shows a domain to people. `verify` is the command that verifies it."""
    show_fields(
        answer,
        {
            "app": app,
            "domain": text_of("domain"),
            "primary": _format_primary,
            "verified": _format_verified,
            "certificate": format_certificate(nested_row(answer, "certificate")),
            "problem": text_of("problem"),
        },
    )
    click.echo("\nRecords for its DNS:")
    records = answer.get("records")
    show_table(records if isinstance(records, list) else [], texts("type", "name", "value"), empty="none")
    if not answer.get("verified"):
        click.echo(f"\nCreate these records, then run: {verify}")


def _show_verification(answer: Row, show: str) -> None:
    """`show` is the command that shows the domain's records."""
    if wants_json():
        show_json(answer)
    name, problem = text_of("domain")(answer), text_of("problem")(answer)
    if not answer.get("verified"):
        raise ServiceRefusal(f"{name} is not verified. {problem} To see the records that it needs, run: {show}")
    if not wants_json():
        click.echo(f"{name} is verified." + (f" {problem}" if problem else ""))


# -- all of an app's domains ------------------------------------------------------------------------------------

domains = Group(
    "domains",
    help="Serve an app at domains of your own, up to five.\n\nSet a domain, create the records in its DNS, then verify "
    "it. Visitors of the others are redirected to the primary domain.",
)
domains.lists(
    "list APP",
    f"{ADDRESS}s",
    "List the custom domains of APP, the primary first.",
    texts("domain")
    | {"primary": _format_primary, "verified": _format_verified}
    | {"certificate": lambda row: format_certificate(nested_row(row, "certificate"))}
    | texts("problem"),
    prose="problem",
    less=["certificate"],
    empty="{app} has no custom domain. Set one with: capsule domains set {app} DOMAIN",
)


@domains.shows(
    "set APP DOMAIN",
    f"PUT {ADDRESS}s/{{domain}} primary",
    "domain",
    click.option("--primary", is_flag=True, default=None, help="Redirect visitors of the other domains to this one."),
)
def domains_set(answer: Row, app: str, **_: str) -> None:
    """Add DOMAIN to APP, or make it the primary, and show the records that it needs.

    A new domain is not served until it is verified.
    """
    _show_domain(answer, app, f"capsule domains verify {app} {text_of('domain')(answer)}")


def _show_one_verification(answer: Row, app: str, **_: str) -> None:
    _show_verification(answer, f"capsule domains set {app} {text_of('domain')(answer)}")


domains.sends(
    "verify APP DOMAIN",
    f"POST {ADDRESS}s/{{domain}}/verify",
    "Ask the DNS now for the record that verifies DOMAIN of APP.",
    Answer("domain", _show_one_verification),
)
domains.sends(
    "remove APP DOMAIN",
    f"DELETE {ADDRESS}s/{{domain}}",
    "Remove DOMAIN of APP. It is no longer served there.",
    done("Removed {domain} of {app}.", "removed", "domain"),
)

# -- the primary one --------------------------------------------------------------------------------------------

domain = Group(
    "domain",
    hidden=True,  # `domains` does the same, and more
    help="Serve an app at a domain of your own: the primary one, if it has several.\n\nSet the domain, create the "
    "records in its DNS, then verify it.",
)


@domain.shows("show APP", f"GET {ADDRESS}", "domain")
def domain_show(answer: Row, app: str, **_: str) -> None:
    """Show the custom domain of APP and the records that it needs."""
    _show_domain(answer, app, f"capsule domain verify {app}")


domain.sends(
    "set APP DOMAIN",
    f"PUT {ADDRESS} domain",
    "Set the custom domain of APP to DOMAIN. A new domain is not served until it is verified.",
    Answer("domain", domain_show),
)
domain.sends(
    "verify APP",
    f"POST {ADDRESS}/verify",
    "Ask the DNS now for the record that verifies the custom domain of APP.",
    Answer("domain", lambda answer, app, **_: _show_verification(answer, f"capsule domain show {app}")),
)
domain.sends(
    "clear APP",
    f"DELETE {ADDRESS}",
    "Remove the custom domain of APP. It is no longer served there.",
    done("Removed the custom domain of {app}.", "cleared", "app"),
)
