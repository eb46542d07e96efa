"""`make chaos`: runs the whole service for some minutes, breaks its parts at random, and checks its books.

The same seed makes the same faults in the same order. The exit code is 1 if anything was violated; then the folder with
all logs, records and append-only files is kept. With `--plant` it is 0 if the bug was found.
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

from tests.chaos.nodes import TOPOLOGIES
from tests.chaos.planted import PLANTS
from tests.chaos.report import table
from tests.chaos.run import Options, Run
from workers.sandbox import cgroups


async def _until_ended(run: Run) -> None:
    """Or until SIGTERM: nothing that was started may stay."""
    task = asyncio.ensure_future(run.run())
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    await task


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=random.randrange(1_000_000))
    parser.add_argument("--rate", type=float, default=200, help="requests per second")
    parser.add_argument("--steps", type=int, help="end after so many steps: a step has one fault, or two")
    parser.add_argument(
        "--small", action="store_true", help="fewer processes and shorter faults; leases and last deploys stay open"
    )
    parser.add_argument("--recovery", type=float, default=5, help="seconds from the recovery of Redis to the service's")
    parser.add_argument("--plant", choices=PLANTS, default="", help="start the service with this bug, and find it")
    parser.add_argument("--redis", choices=TOPOLOGIES, default="cluster", help="which servers run")
    parser.add_argument("--wait", type=int, choices=(0, 1), default=1, help="GATEWAY_REDIS_WAIT, where replicas run")
    parser.add_argument("--processes", type=int, default=1, help="of each gateway")
    parser.add_argument("--s3", action="store_true", help="the storage is reached over the network")
    given = parser.parse_args()
    if not cgroups.find_parents():
        parser.error("the workers build apps, for which this user has no control groups: run it as root")
    options = Options(**vars(given))
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    folder.chmod(0o711)
    print(f"chaos for {options.minutes:g} minutes with the seed {options.seed}, in {folder}", flush=True)
    run = Run(options, folder)
    try:
        uvloop.run(_until_ended(run))
    finally:
        if hasattr(run, "checker"):
            print(table(run), flush=True)
    if given.plant:
        found = [violation for violation in run.checker.violations if PLANTS[given.plant].expected in violation]
        print(f"\n{given.plant!r}: {len(found)} of {len(run.checker.violations)} violations tell of it")
        print("\n".join(found[:3] or ["the bug was not found"]))
        shutil.rmtree(folder, ignore_errors=True)
        return 0 if found else 1
    if run.checker.violations:
        print(f"\n{len(run.checker.violations)} violations; everything is kept in {folder}:")
        print("\n".join(run.checker.violations))
        return 1
    shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
