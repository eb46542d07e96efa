"""`capsule doctor`: checks this machine and its settings."""

import asyncio
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
    from workers.doctor import examine

    rows = [msgspec.to_builtins(row) for row in asyncio.run(examine(load_settings()))]
    show_table(rows, texts("check", "state", "detail", "action"), prose="action", empty="")
    sys.exit(any(row["state"] == "fail" for row in rows))
