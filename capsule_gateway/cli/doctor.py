"""`capsule doctor`: checks this machine and its settings."""

import sys

import click
import msgspec

from capsule_gateway.cli.cells import texts
from capsule_gateway.cli.processes import load_settings
from capsule_gateway.cli.show import as_list, show_table


@click.command()
@as_list
def doctor() -> None:
    """Check this machine and its settings for the service.

    Each row is ok, warn or fail, with what to do. Exits with 1 if a row is fail.
    """
    import uvloop

    from workers.doctor.run import examine

    found = uvloop.run(examine(load_settings(warns=False)))  # which, unlike asyncio, waits for no lookup that hangs
    rows = [msgspec.to_builtins(row) for row in found]
    show_table(rows, texts("check", "state", "detail", "action"), prose="action", empty="")
    sys.exit(any(row["state"] == "fail" for row in rows))
