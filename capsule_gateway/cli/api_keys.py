"""`capsule keys`: the API keys of one account."""

from typing import Any

from capsule_gateway.cli.cells import age_of, texts
from capsule_gateway.cli.commands import Group, done, value

KEYS: dict[str, Any] = {
    "columns": texts("name", "id") | {"created": age_of("createdAt"), "last used": age_of("lastUsedAt", "never")},
    "prose": "name",
    "less": ["created", "last used"],
    "empty": "No keys. Operators create one with: capsule accounts key ID NAME",
}

keys = Group("keys", help="Manage the account's API keys.")
keys.lists("list", "/account/keys", "List the keys, newest first. The keys themselves are not shown.", **KEYS)
keys.sends(
    "create NAME",
    "POST /account/keys name",
    "Create a key called NAME. It is shown only once.",
    value("key", "Created API key {id}. Keep it secret. It is shown only once:"),
)
keys.sends(
    "revoke ID",
    "DELETE /account/keys/{id}",
    "Revoke a key. It stops working at once, and its dashboard sessions end.",
    done("Revoked {id}. Requests with it now get 401, and its dashboard sessions have ended.", "revoked", "id"),
)
