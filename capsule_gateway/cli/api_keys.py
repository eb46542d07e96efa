"""`capsule keys`: the API keys of one account."""

from __future__ import annotations

from collections.abc import Sequence

import click

from capsule_gateway.cli.service import open_service, path
from capsule_gateway.cli.show import Row, age_of, as_json, as_list, show_line, show_secret, show_table, text_of


@click.group()
def keys() -> None:
    """Manage the account's API keys."""


@keys.command("list")
@as_list
def keys_list() -> None:
    """List the keys, newest first. The keys themselves are not shown."""
    show_keys(open_service().list_rows("/account/keys"))


def show_keys(rows: Sequence[Row]) -> None:
    show_table(
        rows,
        {
            "name": text_of("name"),
            "id": text_of("id"),
            "created": age_of("createdAt"),
            "last used": age_of("lastUsedAt", "never"),
        },
        prose="name",
        less=["created", "last used"],
        empty="No keys. Operators create one with: capsule accounts key ID NAME",
    )


@keys.command("create")
@click.argument("name")
@as_json
def keys_create(name: str) -> None:
    """Create a key called NAME. It is shown only once."""
    show_created_key(open_service().request_object("POST", "/account/keys", {"name": name}, having="key"), "")


def show_created_key(record: Row, account: str) -> None:
    """Prints only the key to stdout. `account` names the account, unless it is the caller's own."""
    of_account = f" for {account}" if account else ""
    note = f"Created API key {record.get('id')}{of_account}. Keep it secret. It is shown only once:"
    show_secret(record, "key", note)


@keys.command("revoke")
@click.argument("key_id", metavar="ID")
@as_json
def keys_revoke(key_id: str) -> None:
    """Revoke a key. It stops working at once, and its dashboard sessions end."""
    open_service().send("DELETE", path("account", "keys", key_id))
    show_line(
        {"revoked": key_id}, f"Revoked {key_id}. Requests with it now get 401, and its dashboard sessions have ended."
    )
