"""`capsule doctor`: checks this machine and its settings."""

import sys

import click
import msgspec

from capsule_gateway.cli.cells import texts
from capsule_gateway.cli.processes import log_to_stderr
from capsule_gateway.cli.show import as_list, show_table
from gateway.settings import BadSettings, load


@click.command()
@as_list
def doctor() -> None:
    """Check this machine and its settings for the service.

    Each row is ok, warn or fail, with what to do. Exits with 1 if a row is fail.
    """
    import uvloop

    from workers.doctor.row import CORRECT, Row
    from workers.doctor.run import examine

    log_to_stderr()
    try:
        found = uvloop.run(examine(load()))  # which, unlike asyncio, waits for no lookup that hangs
    except BadSettings as error:
        found = [Row("settings", "fail", fault, CORRECT) for fault in str(error).splitlines()]
    rows = [msgspec.to_builtins(row) for row in found]
    show_table(rows, texts("check", "state", "detail", "action"), prose="action", empty="")
    sys.exit(any(row["state"] == "fail" for row in rows))
