"""`capsule secrets`: which encryption key opens the stored secrets, and how all get the first one.

Operators run it on a machine of the service, with its settings.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

import click

from capsule_gateway.cli.cells import Row, texts
from capsule_gateway.cli.processes import load_settings
from capsule_gateway.cli.service import ServiceRefusal
from capsule_gateway.cli.show import as_json, as_list, print_note, show_line, show_table

if TYPE_CHECKING:
    from gateway.accounts.vault import Vault
    from gateway.redis.client import Store

T = TypeVar("T")


@click.group()
def secrets() -> None:
    """Check and renew the encryption of the stored secrets, on a machine of the service."""


@secrets.command("check")
@as_list
def secrets_check() -> None:
    """Open every stored secret, and count those of each key in GATEWAY_ENCRYPTION_KEY.

    A key without secrets can be removed. Exits with 1 if no key opens one.
    """
    from gateway.operations.sealed import count_sealed

    counts = _run(count_sealed)
    rows: list[Row] = [
        {
            "key": key,
            "use": "encrypts" if key == next(iter(counts.keys)) else "decrypts",
            "secrets": count,
            "record": "",
        }
        for key, count in counts.keys.items()
    ]
    rows += [
        {"key": "", "use": "none", "secrets": count, "record": name} for name, count in sorted(counts.unopened.items())
    ]
    empty = "GATEWAY_ENCRYPTION_KEY is not set, and no secrets are stored."
    show_table(rows, texts("key", "use", "secrets", "record"), empty=empty)
    sys.exit(bool(counts.unopened))


@secrets.command("reencrypt")
@as_json
def secrets_reencrypt() -> None:
    """Encrypt every stored secret with the first key in GATEWAY_ENCRYPTION_KEY.

    The service may run. Restart it with the new key first, so that nothing is encrypted with an older one meanwhile.
    """
    from gateway.operations.sealed import count_sealed, reseal_all

    if not load_settings().encryption_key:
        raise ServiceRefusal("GATEWAY_ENCRYPTION_KEY is not set")
    count = _run(reseal_all)
    counts = _run(count_sealed)
    _, *others = counts.keys.values()
    left, unopened = sum(others), sum(counts.unopened.values())
    show_line(
        {"reencrypted": count, "left": left, "unopened": unopened},
        f"Encrypted {count} of {counts.total} secrets again.",
    )
    if left:
        print_note(f"{left} others were changed meanwhile: run the command again")
    if unopened:
        print_note(f"No key opens {unopened} of them: capsule secrets check names them")
    sys.exit(bool(left or unopened))


def _run(work: Callable[[Store, Vault], Awaitable[T]]) -> T:
    from gateway.accounts.vault import Vault
    from gateway.errors import BackboneUnavailable
    from gateway.redis.client import Store
    from gateway.redis.errors import describe

    settings = load_settings()

    async def run() -> T:
        store = Store(settings.redis_url, ca_file=settings.ca_file)
        try:
            return await work(store, Vault(settings.encryption_key))
        finally:
            await store.close()

    try:
        return asyncio.run(run())
    except BackboneUnavailable as error:
        raise ServiceRefusal(f"Redis: {describe(error.__cause__ or error)}") from None
