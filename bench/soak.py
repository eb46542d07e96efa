"""Runs `capsule serve --workers N` under a steady load, and checks for growth, errors and leftovers.

    make soak                                    # an hour, 100 requests per second, two processes
    make soak ARGS="5 --kill-every 60"           # five minutes; kills a process every minute

Each stream has ten tokens and takes one second, so the number of connections in use equals the requests per second.
Every ten seconds, the script reads the memory (RSS) and descriptors of each process, and scrapes /metrics.

A process has grown if its memory rose by more than 1 MiB over the second half of the run, according to the Theil–Sen
slope (the median of the slopes between all pairs of samples, which ignores single peaks). Its descriptors may rise by
64: a pool keeps the connections of its busiest moment, so on a busy machine both rise for a while. The limit for Redis
is 2 MiB of `used_memory`, because it keeps an hour of counts for each minute and account. Processes that started in the
second half are not judged. `--kill-every` kills the newest process, so the oldest one is always judged.

The exit code is 1 if something grew, if more answers were wrong than kills can explain, if the settled money is wrong,
if a counter decreased, or if Redis holds keys without an expiry that should have one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import redis

sys.path.insert(0, str(Path(__file__).parent.parent))

from callers import APPS
from rig import PROMPT, SCRATCH, Rig, Target, list_processes
from workloads import Load

from bench import INPUT_PRICE, OUTPUT_PRICE, REPORTED_INPUT
from tests.support.key_leaks import find_leaks

TOKENS = 10
DELAY_US = 100_000
SAMPLE = 10.0  # seconds between two samples
GROWTH_KIB = 1024  # allowed per process in the second half
REDIS_GROWTH_KIB = 2048
DESCRIPTORS = 64
LIFE_SECONDS = 90.0  # seconds until the monitors worker settles a killed process's reservations
TIMEOUTS = "connect=5,first=10,idle=10,total=15"


@dataclass
class Series:
    """The samples of one process."""

    times: list[float] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)  # KiB
    descriptors: list[float] = field(default_factory=list)

    def add(self, now: float, memory: float, descriptors: int) -> None:
        self.times.append(now)
        self.memory.append(memory)
        self.descriptors.append(descriptors)

    def growth(self, values: Sequence[float], since: float) -> float:
        """Returns the slope times the duration since `since`."""
        points = [(t, v) for t, v in zip(self.times, values, strict=True) if t >= since]
        slopes = [(v - u) / (t - s) for (s, u), (t, v) in itertools.combinations(points, 2)]
        return median(slopes) * (points[-1][0] - points[0][0])


class Soak:
    def __init__(self, rig: Rig, gateway: Target, rate: int, seconds: float, kill_every: float) -> None:
        self.rig, self.gateway, self.rate, self.seconds, self.kill_every = rig, gateway, rate, seconds, kill_every
        self.redis = redis.Redis(port=rig.redis_port)
        self.redis_pid = int(self.redis.info("server")["process_id"])
        self.series: dict[str, Series] = {}
        self.good = self.wrong = self.sent = self.kills = 0
        self.message = ""
        self.faults: list[str] = []
        self._settled_before = self._spend()[0]
        self._requests = 0.0  # as /metrics counts them

    def run(self) -> None:
        load = threading.Thread(target=self._load)
        began = time.monotonic()
        load.start()
        next_kill = began + (self.kill_every or float("inf"))
        while load.is_alive():
            now = time.monotonic()
            self._sample(now - began)
            if now >= next_kill and now < began + self.seconds - SAMPLE:
                self._kill_the_newest()
                next_kill += self.kill_every
            load.join(max(0.0, SAMPLE - (time.monotonic() - now)))

    def _load(self) -> None:
        load = Load(TOKENS, self.rate, self.seconds, 0, delay_us=DELAY_US, ramp_ms=900)
        result = self.rig.load(self.gateway, load)
        self.sent, self.good = result["sent"], result["good"]
        self.wrong = self.sent - self.good
        self.message = result["errmsg"]

    def _sample(self, now: float) -> None:
        for pid in list_processes(self.gateway.pid):
            memory, descriptors = usage(pid)
            if memory:
                self.series.setdefault(f"{role(pid)} {pid}", Series()).add(now, memory, descriptors)
        _, descriptors = usage(self.redis_pid)
        self.series.setdefault("redis", Series()).add(now, self.redis.info("memory")["used_memory"] / 1024, descriptors)
        self._scrape()

    def _scrape(self) -> None:
        try:
            with urllib.request.urlopen(f"{self.gateway.address}/metrics", timeout=10) as answer:
                text = answer.read().decode()
        except OSError as error:
            if not self.kill_every:  # otherwise a killed process may have taken the connection
                self.faults.append(f"/metrics: {error}")
            return
        requests = sum(float(value) for value in re.findall(r"^gateway_requests_total\{.*\} (\S+)$", text, re.M))
        if requests < self._requests:
            self.faults.append(f"gateway_requests_total fell from {self._requests:.0f} to {requests:.0f}")
        self._requests = requests

    def _kill_the_newest(self) -> None:
        serving = [pid for pid in list_processes(self.gateway.pid) if role(pid) == "gateway"]
        if len(serving) > 1:
            self.kills += 1
            os.kill(max(serving), signal.SIGKILL)

    # -- afterwards ------------------------------------------------------------------------------------------

    def check(self) -> None:
        if self.wrong > self.kills * self.rate:
            self.faults.append(f"{self.wrong} wrong answers; kills explain at most {self.kills * self.rate}")
        self._check_money()
        give_up = time.monotonic() + 5  # the gauge is refreshed periodically
        while (streams := self._open_streams()) and time.monotonic() < give_up:
            time.sleep(0.5)
        if streams:
            self.faults.append(f"gateway_streams_open is {streams:.0f} after the last stream")
        if left := find_leaks(self.redis):
            self.faults.append(f"{len(left)} keys in Redis without an end, such as {left[:3]}")

    def _check_money(self) -> None:
        """Checks that complete answers cost their usage, and answers cut by a kill at most their bound."""
        usage = REPORTED_INPUT * INPUT_PRICE + TOKENS * OUTPUT_PRICE
        bound = (len(PROMPT) + 256) * INPUT_PRICE + TOKENS * OUTPUT_PRICE
        give_up = time.monotonic() + (LIFE_SECONDS + 30 if self.kills else 15)
        while (spend := self._spend())[1] and time.monotonic() < give_up:
            time.sleep(1)
        settled, reserved = spend[0] - self._settled_before, spend[1]
        least, most = self.good * usage, self.good * usage + self.wrong * bound
        if reserved or not least <= settled <= most:
            self.faults.append(f"{settled:,} settled and {reserved:,} reserved, expected {least:,} to {most:,} and 0")

    def _spend(self) -> tuple[int, int]:
        """Returns the nano-euro settled and reserved by all accounts."""
        days = [self.redis.hmget(key, "settled", "reserved") for key in self.redis.scan_iter("{p*}:spend:*", 1000)]
        return sum(int(settled or 0) for settled, _ in days), sum(int(reserved or 0) for _, reserved in days)

    def _open_streams(self) -> float:
        with urllib.request.urlopen(f"{self.gateway.address}/metrics", timeout=10) as answer:
            found = re.search(r"^gateway_streams_open (\S+)$", answer.read().decode(), re.M)
        return float(found[1]) if found else 0.0

    def report(self) -> str:
        middle = self.seconds / 2
        lines = ["| process | samples | memory, KiB, first / last | growth in the second half | descriptors |"]
        lines += ["| --- | --- | --- | --- | --- |"]
        for name, series in self.series.items():
            judged = series.times[0] < middle and sum(t >= middle for t in series.times) > 5
            ended = series.times[-1] < self.seconds - 3 * SAMPLE
            cell = "ended before" if ended else "too young"
            if judged and not ended:
                memory = series.growth(series.memory, middle)
                descriptors = series.growth(series.descriptors, middle)
                cell = f"{memory:+.0f} KiB"
                if memory > (REDIS_GROWTH_KIB if name == "redis" else GROWTH_KIB):
                    self.faults.append(f"{name} grew by {memory:.0f} KiB")
                if descriptors > DESCRIPTORS:
                    self.faults.append(f"{name} opened {descriptors:.0f} more descriptors")
            lines.append(
                f"| {name} | {len(series.times)} | {series.memory[0]:.0f} / {series.memory[-1]:.0f} | {cell}"
                f" | {min(series.descriptors):.0f}–{max(series.descriptors):.0f} |"
            )
        lines += ["", f"{self.sent} requests, {self.good} answered well, {self.wrong} not, {self.kills} kills"]
        lines += [f"The first wrong answer: {self.message}"] if self.message else []
        lines += [f"FAULT: {fault}" for fault in self.faults]
        return "\n".join(lines)


def role(pid: int) -> str:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return "ended"
    roles = {b"spawn_main": "gateway", b"resource_tracker": "tracker"}
    return next((name for sign, name in roles.items() if sign in command), "supervisor")


def usage(pid: int) -> tuple[float, int]:
    """Returns the KiB of memory (RSS) and the open descriptors; zeros if the process has ended."""
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        return float(re.findall(r"^Rss:\s+(\d+) kB", rollup, re.M)[0]), len(os.listdir(f"/proc/{pid}/fd"))
    except (OSError, IndexError):
        return 0.0, 0


def monitors(rig: Rig) -> subprocess.Popen[bytes]:
    """Starts a monitors worker, which settles the reservations of killed processes."""
    environment = {**os.environ, "GATEWAY_REDIS_URL": f"redis://127.0.0.1:{rig.redis_port}/0"}
    with (SCRATCH / "monitors.log").open("wb") as log:
        command = [sys.executable, "-m", "capsule_gateway", "worker", "monitors"]
        return subprocess.Popen(command, env=environment, cwd=SCRATCH, stdout=log, stderr=subprocess.STDOUT)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("minutes", nargs="?", type=float, default=60.0)
    parser.add_argument("--rate", type=int, default=100, help="requests per second; the rate limits allow at most 300")
    parser.add_argument("--workers", type=int, default=2, help="processes of the gateway; at least 2")
    parser.add_argument("--kill-every", type=float, default=0.0, metavar="SECONDS", help="kill a process every SECONDS")
    options = parser.parse_args()
    command = f"env GATEWAY_PROVIDER_TIMEOUTS={TIMEOUTS} {sys.executable} -m capsule_gateway serve --port {{port}}"
    with Rig(f"{command} --workers {max(2, options.workers)}") as rig, rig.gateway() as gateway:
        rig.load(gateway, Load(8, 8, 30, 0), limit=2 * APPS)  # warm the caches of all processes
        print(f"soak: {options.minutes:g} minutes at {options.rate} requests per second", flush=True)
        soak = Soak(rig, gateway, options.rate, options.minutes * 60, options.kill_every)
        worker = monitors(rig)
        try:
            soak.run()
            soak.check()
        finally:
            worker.terminate()
            worker.wait()
        print(soak.report())
        (SCRATCH / "soak.json").write_text(json.dumps({n: (s.times, s.memory) for n, s in soak.series.items()}))
    return int(bool(soak.faults))


if __name__ == "__main__":
    sys.exit(main())
