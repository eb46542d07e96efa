"""`make chaos`: runs the whole service for some minutes, breaks its parts at random, and checks from outside that it
keeps every guarantee.

The same seed makes the same faults in the same order. If the run finds violations, the exit code is 1, and the folder
with all logs, records and append-only files is kept.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import uvloop

from tests.chaos.run import Options, Run, render_table
from tests.support.folders import kill_caddies
from workers.sandbox import cgroups


async def _run_until_stopped(run: Run) -> None:
    """Runs until the end or SIGTERM. Both stop every process that the run started."""
    task = asyncio.ensure_future(run.run())
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    await task


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=random.randrange(1_000_000))
    parser.add_argument("--rate", type=float, default=200, help="requests per second")
    parser.add_argument("--steps", type=int, help="end after this many steps; a step has one or two faults")
    parser.add_argument(
        "--small",
        action="store_true",
        help="fewer processes and shorter faults; reservations and the last deploys stay open",
    )
    parser.add_argument(
        "--recovery", type=float, default=5, help="seconds within which everything works once Redis does"
    )
    given = parser.parse_args()
    if not cgroups.find_parents():
        parser.error("the workers build apps, which needs control groups, and this user has none: run it as root")
    options = Options(**vars(given))
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    folder.chmod(0o711)
    print(f"chaos for {options.minutes:g} minutes with the seed {options.seed}, in {folder}", flush=True)
    run = Run(options, folder)
    try:
        uvloop.run(_run_until_stopped(run))
    finally:
        kill_caddies(folder)
        if hasattr(run, "checker"):
            print(render_table(run), flush=True)
            if run.checker.violations:
                print(f"\n{len(run.checker.violations)} violations; everything is kept in {folder}:")
                print("\n".join(run.checker.violations), flush=True)
    if run.checker.violations:
        return 1
    shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
