"""`capsule backup` and `capsule restore`: copy the whole service to a folder or S3, and bring it back.

Operators run them on a machine of the service, with its settings. The workers' code is imported late.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec

from capsule_gateway.cli.arguments import NumberType
from capsule_gateway.cli.cells import Columns, Row, format_size, texts
from capsule_gateway.cli.processes import load_settings
from capsule_gateway.cli.service import ServiceRefusal, WrongUsage
from capsule_gateway.cli.show import as_list, print_note, show_table, wants_table
from gateway.ids import now_iso
from gateway.settings import Settings

if TYPE_CHECKING:
    from workers.backup.run import Report
    from workers.backup.target import BackupManifest, BackupTarget

T = TypeVar("T")
ACTIONS = ("list", "verify")
MIB = 1_048_576
COLUMNS: Columns = {
    **texts("at", "state", "accounts", "apps"),
    "size": lambda row: format_size(row.get("size")),
    **texts("notes", "detail"),
}
TIME = re.compile(
    r"\d{4}-\d\d-\d\d(?P<minute>[T ]\d\d:\d\d(?P<second>:\d\d(?P<fraction>\.\d{1,6})?)?(Z|[+-]\d\d(:?\d\d)?)?)?",
    re.ASCII,
)
HINT = "is not a time; use one like 2026-07-02, '2026-07-02 10:00' or 2026-07-02T10:00:00Z"


def parse_until(context: click.Context, option: click.Parameter, text: str | None) -> str:
    """Returns the last millisecond of the day, minute or second that the text names, as `now_iso` formats it."""
    from gateway.ids import read_time

    if text is None:
        return ""
    if (found := TIME.fullmatch(text)) is None:
        raise click.BadParameter(f"{text!r} {HINT}", context, option)
    span = 86_400 if not found["minute"] else 60 if not found["second"] else 1 if not found["fraction"] else 0
    try:
        return now_iso(read_time(text) + span - 0.001 * bool(span))
    except ValueError:
        raise click.BadParameter(f"{text!r} {HINT}", context, option) from None


at_time = click.option(
    "--at",
    metavar="TIME",
    callback=parse_until,
    help="Ignore backups after this time, such as 2026-07-02 (its end) or 2026-07-02T10:00. It is in UTC unless it has "
    "an offset.",
)
any_author = click.option(
    "--unauthenticated", is_flag=True, help="Take a backup that does not prove that this service made it."
)


@click.command()
@click.argument("words", nargs=-1, required=True, metavar="[list|verify] TARGET")
@at_time
@any_author
@click.option("--keep", type=NumberType(min=1), help="Afterwards, remove all backups but the last N.")
@as_list
def backup(words: tuple[str, ...], at: str, unauthenticated: bool, keep: int | None) -> None:
    """Back up the service to TARGET, a folder or s3://bucket/prefix.

    A further backup to the same TARGET copies only what is new.

    \b
    list     lists the backups, and says which are damaged or not made by this service
    verify   reads a whole backup, and compares it with its digests and authenticator
    """
    action = words[0] if words[0] in ACTIONS else ""
    if len(words) != 1 + bool(action):
        raise WrongUsage("expected TARGET, list TARGET or verify TARGET")
    if at and not action:
        raise WrongUsage("--at is for list and verify")
    if unauthenticated and action != "verify":
        raise WrongUsage("--unauthenticated is for verify")
    if action != "list" and not wants_table():
        raise WrongUsage("--json and --format are for list")
    if keep and action:
        raise WrongUsage("--keep is for a backup")
    settings, began = load_settings(), time.monotonic()
    match action:
        case "list":
            rows = _run(_list(settings, words[1], at))
            show_table(rows, COLUMNS, prose="detail", less=["notes", "apps", "accounts"], empty="No backups.")
        case "verify":
            _run(_verify(settings, words[1], at, unauthenticated))
        case _:
            report = _run(_back_up(settings, words[0], keep or 0))
            _print_notes(report)
            click.echo(
                f"Backed up {report.manifest.accounts} accounts and {report.manifest.apps} apps as of "
                f"{report.manifest.at}: {report.manifest.size / MIB:.1f} MiB, of which {report.added / MIB:.1f} MiB "
                f"were new, in {time.monotonic() - began:.1f} s"
            )


@click.command()
@click.argument("target")
@at_time
@any_author
@click.option("--force", is_flag=True, help="End apps that run, and replace the data in Redis and in the storage.")
@click.option("--spent-today", type=click.Choice(["full"]), help="Use up the caps of all accounts for this UTC day.")
@click.option(
    "--dry-run", is_flag=True, help="Check the backup and this service, say what a restore would do, and stop."
)
def restore(target: str, at: str, unauthenticated: bool, force: bool, spent_today: str | None, dry_run: bool) -> None:
    """Restore a backup from TARGET into an empty Redis and storage.

    Stop the gateways and workers first. Run it where the apps run, as the same user.
    """
    settings, began = load_settings(), time.monotonic()
    report = _run(_restore(settings, target, at, unauthenticated, force, spent_today == "full", dry_run))
    _print_notes(report)
    what = f"{report.manifest.accounts} accounts and {report.manifest.apps} apps as of {report.manifest.at}"
    if dry_run:
        click.echo(f"Nothing was written. A restore would bring back {what}")
    else:
        click.echo(f"Restored {what} in {time.monotonic() - began:.1f} s")


async def _open(
    settings: Settings, address: str, *, create: bool = False, unauthenticated: bool = False
) -> BackupTarget:
    from gateway.accounts.vault import Vault
    from workers.backup.target import BackupTarget, open_target

    if not address:
        raise WrongUsage("TARGET is empty: name a folder or s3://bucket/prefix")
    vault = Vault(settings.encryption_key)
    return BackupTarget(open_target(address, create=create), vault, unauthenticated=unauthenticated)


async def _list(settings: Settings, address: str, at: str) -> list[Row]:
    target = await _open(settings, address)
    return [msgspec.to_builtins(row) for row in await target.describe_all() if not at or row.at <= at]


async def _verify(settings: Settings, address: str, at: str, unauthenticated: bool) -> None:
    target = await _open(settings, address, unauthenticated=unauthenticated)
    manifest = await target.find(at)
    print_note(f"Reading the backup of {manifest.at}")
    count = await target.verify(manifest)
    if unauthenticated or not settings.encryption_key:
        print_note("Note: nothing was compared with GATEWAY_ENCRYPTION_KEY, so anybody may have made this backup")
    click.echo(f"The backup of {manifest.at} is complete: {count} objects, {manifest.size / MIB:.1f} MiB")


async def _back_up(settings: Settings, address: str, keep: int) -> Report:
    from workers.backup.run import Backup

    async with contextlib.aclosing(Backup(settings, await _open(settings, address, create=True))) as made:
        return await made.make(keep)


async def _restore(
    settings: Settings, address: str, at: str, unauthenticated: bool, force: bool, spent_today: bool, dry_run: bool
) -> Report:
    from workers.backup.run import Backup

    target = await _open(settings, address, unauthenticated=unauthenticated)
    async with contextlib.aclosing(Backup(settings, target)) as made:
        announce = partial(_announce, "Reading" if dry_run else "Restoring")
        return await made.restore(at, force=force, spent_today=spent_today, dry_run=dry_run, announce=announce)


def _announce(verb: str, manifest: BackupManifest) -> None:
    print_note(
        f"{verb} the backup of {manifest.at}: {manifest.accounts} accounts, {manifest.apps} apps, "
        f"{manifest.size / MIB:.1f} MiB"
    )


def _print_notes(report: Report) -> None:
    for note in report.notes:
        print_note(f"Note: {note}")


def _run(work: Coroutine[Any, Any, T]) -> T:
    """Runs the work. Raises ServiceRefusal with its reason."""
    from gateway.errors import BackboneUnavailable, StorageFull, StorageUnavailable
    from gateway.redis.errors import describe
    from workers.backup.run import BackupRefused
    from workers.backup.spool import SpoolFailed
    from workers.backup.target import BadBackup

    try:
        return asyncio.run(work)
    except* (BackupRefused, BadBackup, SpoolFailed) as group:
        reason = str(_first(group))
    except* BackboneUnavailable as group:
        reason = f"Redis: {describe(_first(group).__cause__)}"
    except* StorageUnavailable as group:
        if isinstance(_first(group), StorageFull):
            reason = "the disk of the storage or of the target is full: make room there, and run the command again"
        else:
            reason = "the storage or the target does not answer, or refuses; the line above says why"
    raise ServiceRefusal(reason)


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    found: BaseException = group
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found
