"""Measures the cost of a webhook delivery, and the delay of a healthy receiver next to a hanging one.

The worker runs alone on core 1. Redis, the receivers and this script share core 0. With `--against`, this script and
that of another commit run in turn, every second time in the reverse order. The exit code is 1 if an event was lost or
sent twice, but never because of a measurement.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from statistics import quantiles

import uvloop

sys.path.insert(0, str(Path(__file__).parent.parent))

from rig import SCRATCH, cpu_seconds, install_commit, redis_server, two_cores

from gateway.accounts.vault import Vault
from gateway.events import scripts
from gateway.events.catalog import SAMPLES, prepare_event
from gateway.events.webhooks import Webhooks
from gateway.ids import new_id
from gateway.redis.client import Store

ACCOUNTS = 64
EVENTS = 200  # per account
HANGING = 1_000  # events queued for the hanging receiver
HEALTHY = 500  # events queued meanwhile for healthy receivers, one every 20 ms
KEY = "bench-encryption-key-of-no-value-0123456789"


class Receiver:
    """A receiver that answers at once or never, and records when each delivery arrived."""

    def __init__(self) -> None:
        self.arrivals: dict[str, list[float]] = {}

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                fields = dict(line.split(b": ", 1) for line in head.split(b"\r\n")[1:] if line)
                fields = {name.lower(): value for name, value in fields.items()}
                await reader.readexactly(int(fields[b"content-length"]))
                if head.startswith(b"POST /hang"):
                    await reader.read()  # until the worker gives up
                self.arrivals.setdefault(fields[b"webhook-id"].decode(), []).append(time.monotonic())
                writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()


async def emit(store: Store, account: str, event_type: str) -> str:
    """Queues a sample event. `Webhooks.test` would allow an account too few of them."""
    event = prepare_event(SAMPLES[event_type], new_id("evt"), account, "app_sample", "sample")
    await scripts.emit_event(store, event)
    return event.id


async def measure(redis_url: str, start_worker: list[str], environment: dict[str, str], core: int) -> bool:
    receiver = Receiver()
    server = await asyncio.start_server(receiver.answer, "127.0.0.1", 0)
    address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    store = Store(redis_url)
    webhooks = Webhooks(store, Vault(KEY), allow_private=True)
    accounts = [f"acc_{n}" for n in range(ACCOUNTS)]
    for account in accounts:
        await webhooks.set_receiver(account, f"{address}/fine")
    await webhooks.set_receiver("acc_hang", f"{address}/hang")
    sent = [await emit(store, account, "deploy.succeeded") for _ in range(EVENTS) for account in accounts]

    log = (SCRATCH / "worker.log").open("wb")
    worker = subprocess.Popen(start_worker, env=environment, stdout=log, stderr=log)
    os.sched_setaffinity(worker.pid, {core})
    try:
        while len(receiver.arrivals) < len(sent) // 10:
            if worker.poll() is not None:
                raise SystemExit(f"bench: the worker ended; see {log.name}")
            await asyncio.sleep(0.01)
        first, began = len(receiver.arrivals), cpu_seconds(worker.pid)
        while len(receiver.arrivals) < len(sent):
            await asyncio.sleep(0.01)
        used = cpu_seconds(worker.pid) - began
        print(
            f"deliveries per CPU second, {ACCOUNTS} accounts: {(len(sent) - first) / used:,.0f} (aim 5,000)", flush=True
        )

        for _ in range(HANGING):
            await emit(store, "acc_hang", "app.crashed")
        delays = []
        for n in range(HEALTHY):
            queued = time.monotonic()
            event = await emit(store, accounts[n % ACCOUNTS], "app.crashed")
            sent.append(event)
            while event not in receiver.arrivals:
                await asyncio.sleep(0.001)
            delays.append((receiver.arrivals[event][0] - queued) * 1000)
            await asyncio.sleep(0.02)
        cuts = quantiles(delays, n=100)
        print(f"delay of a healthy receiver next to {HANGING:,} events for one that hangs: ", end="")
        print(f"p50 {cuts[49]:.1f} ms, p99 {cuts[98]:.1f} ms", flush=True)
    finally:
        worker.terminate()
        await asyncio.to_thread(worker.wait, 30)
        server.close()
        await store.close()
    times = Counter(len(receiver.arrivals.get(event, [])) for event in sent)
    print(f"events {len(sent):,}: lost {times[0]}, sent twice {sum(times.values()) - times[0] - times[1]}")
    return times == {1: len(sent)}


def compare(commit: str, runs: int) -> int:
    """Measures this commit and another one in turn. Returns the number of failed runs."""
    folders = {"this commit": Path(__file__).parent.parent, commit: install_commit(commit)}
    failed = 0
    for run in range(runs):
        for name in list(folders)[:: -1 if run % 2 else 1]:
            print(f"{name}:", flush=True)
            command = [folders[name] / ".venv" / "bin" / "python", folders[name] / "bench" / "deliveries.py"]
            # `python -m` looks for the worker in the working folder first.
            failed += subprocess.run(command, cwd=folders[name], check=False).returncode != 0
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", "--runs", type=int, default=4, help="runs of each commit, with --against")
    parser.add_argument("--against", metavar="COMMIT", help="measure another commit too")
    options = parser.parse_args()
    if options.against:
        return int(compare(options.against, options.runs) > 0)
    return measure_here()


def measure_here() -> int:
    others, alone = two_cores()
    os.sched_setaffinity(0, {others})
    with redis_server() as port:
        environment = {
            "PATH": os.environ["PATH"],
            "GATEWAY_REDIS_URL": f"redis://127.0.0.1:{port}/0",
            "GATEWAY_ALLOW_PRIVATE_ADDRESSES": "true",
            "GATEWAY_ENCRYPTION_KEY": KEY,
        }
        command = [sys.executable, "-m", "workers", "webhooks"]
        return 0 if uvloop.run(measure(environment["GATEWAY_REDIS_URL"], command, environment, alone)) else 1


if __name__ == "__main__":
    sys.exit(main())
