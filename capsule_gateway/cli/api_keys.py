"""`capsule keys`: the API keys of one account."""

from typing import Any

import click

from capsule_gateway.cli.cells import Row, age_of, text_of, texts
from capsule_gateway.cli.commands import Group, done, value


def _format_scope(row: Row) -> str:
    return " ".join(filter(None, (text_of("scope")(row), text_of("app")(row))))


KEYS: dict[str, Any] = {
    "columns": texts("name", "id")
    | {
        "scope": _format_scope,
        "created": age_of("createdAt"),
        "by": text_of("by"),
        "last used": age_of("lastUsedAt", "never"),
    },
    "prose": "name",
    "less": ["by", "created", "last used"],
    "empty": "No keys. Operators create one with: capsule accounts create-key ID NAME",
}

keys = Group("keys", formerly={"revoke": "remove"}, help="Manage the account's API keys.")
keys.lists("list", "/account/keys", "List the keys, newest first. The keys themselves are not shown.", **KEYS)
keys.sends(
    "create NAME",
    "POST /account/keys name scope app",
    "Create a key called NAME. It is shown only once.\n\n"
    "With the scope 'deploy', it can publish apps, and manage and read deploys with their logs. With 'read', it can "
    "change nothing.",
    value("key", "Created API key {id} with the scope '{scope}'. Keep it secret. It is shown only once:"),
    click.option(
        "--scope",
        type=click.Choice(("full", "deploy", "read")),
        default="full",
        show_default=True,
        help="What the key may do.",
    ),
    click.option("--app", metavar="APP", help="Only for this app, with the scope 'deploy' or 'read'."),
)
keys.sends(
    "remove KEY_ID",
    "DELETE /account/keys/{id}",
    "Revoke and remove a key. It stops working at once, and its dashboard sessions end.",
    done("Revoked {id}. Requests with it now get 401, and its dashboard sessions have ended.", "revoked", "id"),
)
