"""`capsule members`: the people who belong to one account."""

import click

from capsule_gateway.cli.cells import age_of, texts
from capsule_gateway.cli.commands import Group, done

members = Group("members", help="Manage the account's members, who sign in to its dashboard.")
members.lists(
    "list",
    "/account/members",
    "List the members with their roles.",
    columns=texts("email", "role") | {"since": age_of("since")},
    prose="email",
    less=["since"],
    empty="No members. Add one with: capsule members set EMAIL ROLE",
)
members.sends(
    "set EMAIL",
    "PUT /account/members/{email} role",
    "Add a member, or change a member's role.\n\n"
    "An owner may do everything. A developer may not change keys, members or limits, nor delete apps or the account. A "
    "viewer reads.",
    done("{email} is now a member with the role '{role}'.", "email", "role"),
    click.argument("role", type=click.Choice(("owner", "developer", "viewer"))),
)
members.sends(
    "remove EMAIL",
    "DELETE /account/members/{email}",
    "Remove a member. Their dashboard sessions end at once.",
    done("Removed {email}. Their sessions have ended.", "removed", "email"),
)
