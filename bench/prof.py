"""Profiles the gateway with py-spy, and prints self and cumulative shares of CPU time under one workload.

py-spy is not a dependency of the project: run `.venv/bin/pip install py-spy` first.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

from callers import APPS
from rig import SCRATCH, Rig
from workloads import WORKLOADS, Load

SAMPLED = 5  # seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", nargs="?", default="B500", help=f"one of {', '.join(WORKLOADS)}")
    parser.add_argument("--native", action="store_true", help="include frames of C extensions")
    parser.add_argument("--lines", action="store_true", help="count lines instead of functions")
    parser.add_argument("--gateway", metavar="COMMAND", help="command that starts another gateway, with {port} in it")
    options = parser.parse_args()
    workload = WORKLOADS[options.workload]
    load = replace(workload.load, seconds=SAMPLED + 1)
    raw = SCRATCH / "profile.raw"
    with Rig(options.gateway) as rig, rig.gateway() as gateway:
        rig.load(gateway, Load(8, 8, 30, 0), limit=APPS)
        rotation = rig.callers.fresh_rotation(gateway.name, 2 * workload.most) if workload.strangers else None
        limit = 15 * APPS  # together with the warm-up, this is what the users' rate limits allow per minute
        run = threading.Thread(target=lambda: print(rig.load(gateway, load, rotation, limit), file=sys.stderr))
        run.start()
        time.sleep(load.warmup + 0.2)
        _record(gateway.pid, raw, options.native, options.lines)
        run.join()
    _print_shares(raw)


def _record(pid: int, raw: Path, native: bool, lines: bool) -> None:
    spy = Path(sys.executable).parent / "py-spy"
    if not spy.exists():
        raise SystemExit(f"prof: {spy} is missing; install py-spy for this Python")
    command = [spy, "record", "-p", str(pid), "-d", str(SAMPLED), "-r", "400", "-f", "raw", "-o", raw]
    command += [*(["--native"] if native else ["--nonblocking"]), *([] if lines else ["-F"])]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def _print_shares(raw: Path) -> None:
    alone: Counter[str] = Counter()
    cumulative: Counter[str] = Counter()
    for line in raw.read_text().splitlines():
        stack, count = line.rsplit(" ", 1)
        frames = stack.split(";")
        alone[frames[-1]] += int(count)
        for frame in set(frames):
            cumulative[frame] += int(count)
    total = alone.total()
    for title, counter, rows in (("self", alone, 30), ("cumulative", cumulative, 40)):
        print(f"{title}, of {total} samples")
        for frame, samples in counter.most_common(rows):
            print(f"  {100 * samples / total:5.1f} %  {frame}")


if __name__ == "__main__":
    main()
