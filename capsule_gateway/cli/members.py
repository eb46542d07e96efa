"""`capsule members`: the people who belong to one account, and those who are invited."""

import click

from capsule_gateway.cli.cells import Row, age_of, strip_controls, texts
from capsule_gateway.cli.commands import Group, done


def _format_end(row: Row) -> str:
    return str(row.get("endsAt") or "")[:10]


members = Group("members", help="Manage the account's members, who sign in to its dashboard.")
members.lists(
    "list",
    "/account/members",
    "List the members and those who are invited, with their roles.",
    columns=texts("email", "role", "state") | {"since": age_of("since"), "ends": _format_end},
    prose="email",
    less=["since", "ends"],
    empty="No members. Invite one with: capsule members set EMAIL ROLE",
)


@members.shows(
    "set MEMBER",
    "PUT /account/members/{email} role",
    "email",
    click.argument("role", metavar="ROLE", type=click.Choice(("owner", "developer", "viewer"))),
)
def set_member(member: Row, **_: str) -> None:
    """Invite somebody, or change the role of a member or of an invitation.

    Whoever is invited becomes a member by signing in and accepting, within 14 days. An owner may do everything. A
    developer may not change keys, members or limits, nor delete apps or the account. A viewer reads.
    """
    email, role = strip_controls(str(member["email"])), member.get("role")
    if member.get("state") == "invited":
        click.echo(f"{email} is invited with the role '{role}' until {_format_end(member)}.")
    else:
        click.echo(f"{email} is a member with the role '{role}'.")


members.sends(
    "remove MEMBER",
    "DELETE /account/members/{email}",
    "Remove a member, or cancel an invitation. A member's dashboard sessions end at once.",
    done("Removed {email}. Their sessions for this account have ended.", "removed", "email"),
)
