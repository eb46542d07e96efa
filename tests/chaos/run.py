"""Runs the whole service: starts everything, sends the load, injects faults, and checks the guarantees."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import os
import secrets
import subprocess
import sys
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import quantiles
from typing import Any

import aiohttp
import msgspec

from gateway.cancellation import end_if_canceled
from tests.chaos.books import Disturbance
from tests.chaos.checker import Checker
from tests.chaos.faults import Fault, Faults, Step, plan_steps
from tests.chaos.load import COMPLETION, PROMPT, make_prompt
from tests.chaos.nodes import Cluster, Fleet
from tests.chaos.population import Population
from tests.support.preloaded import python
from tests.support.redis_servers import free_port

WORKERS = ("webhooks", "monitors", "deploys")
# Shorter times for a small run, so that it recovers quickly.
SMALL = {"workers.stream.RENEWAL_SECONDS": 1.0}
SMALL_DEPLOYS = {"workers.builds.rollout.UNDO_SECONDS": 10.0, "workers.builds.schedule.HELD_MS": 5_000}
STREAM_SECONDS = 15  # timeout of a stream; a reservation lives 60 s longer
START_SECONDS = 10  # additional ones that a killed process may take to start
PROBE_APPS = 12  # that the run probes in each shard
PROBE_SECONDS = 5.0  # timeout of a probe
PROBE_INTERVAL_SECONDS = 0.4  # for each gateway and shard
CHECK_INTERVAL_SECONDS = 0.25  # of Redis


@dataclass
class StoreState:
    ok: bool = True
    since: float = 0.0  # when `ok` changed last
    seen: float = 0.0  # when the last check began


class Recovery:
    """A prober of the service. `callers`: the names and user tokens of each shard's apps.

    There are enough apps that their probes stay within the rate limits.
    """

    def __init__(
        self, servers: Cluster, gateways: Mapping[str, str], callers: Sequence[Sequence[tuple[str, str]]]
    ) -> None:
        self._servers, self._gateways = servers, gateways
        self._callers = [itertools.cycle(several) for several in callers]
        self.state = StoreState()
        self._answers: dict[tuple[str, int], deque[float]] = defaultdict(lambda: deque(maxlen=2000))

    async def watch(self) -> None:
        timeout = aiohttp.ClientTimeout(total=PROBE_SECONDS)
        async with (
            aiohttp.ClientSession(
                timeout=timeout, connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2)
            ) as session,
            asyncio.TaskGroup() as tasks,
        ):
            tasks.create_task(self._watch_servers())
            for name in self._gateways:
                for shard in range(len(self._callers)):
                    tasks.create_task(self._watch_gateway(session, name, shard))

    async def _watch_servers(self) -> None:
        while True:
            end_if_canceled()
            began = time.monotonic()
            ok = await self._servers.takes_writes()
            if ok != self.state.ok:
                self.state.ok, self.state.since = ok, time.monotonic()
            self.state.seen = began
            await asyncio.sleep(CHECK_INTERVAL_SECONDS)

    async def _watch_gateway(self, session: aiohttp.ClientSession, name: str, shard: int) -> None:
        """Starts a probe at each interval. A probe that hangs does not delay the next."""
        async with asyncio.TaskGroup() as probes:
            while True:
                probes.create_task(self._probe(session, name, shard))
                await asyncio.sleep(PROBE_INTERVAL_SECONDS)

    async def _probe(self, session: aiohttp.ClientSession, name: str, shard: int) -> None:
        app, token = next(self._callers[shard])
        url = f"{self._gateways[name]}/capsule/{app}/ai"
        body = json.dumps({"prompt": make_prompt(0), "maxTokens": 64, "stream": True})
        headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
            async with session.post(url, data=body, headers=headers) as response:
                if response.status == 200:
                    self._answers[name, shard].append(time.monotonic())

    # -- measurements ----------------------------------------------------------------------------------------

    async def wait_for_redis(self, since: float, seconds: float = 90) -> float:
        """Waits until Redis works, and returns when it began to. Raises TimeoutError."""
        async with asyncio.timeout(seconds):
            while not (self.state.ok and self.state.seen > since):
                await asyncio.sleep(0.05)
        return self.state.since

    async def measure_gateway(self, name: str, since: float, seconds: float) -> float | None:
        """Returns the seconds from `since` until the gateway has answered for every shard; None if above `seconds`."""
        shards = [self._answers[name, shard] for shard in range(len(self._callers))]
        while True:
            first = [next((at for at in answers if at >= since), None) for answers in shards]
            found = [at for at in first if at is not None]
            if len(found) == len(shards):
                return max(found) - since
            if time.monotonic() > since + seconds:
                return None
            await asyncio.sleep(0.05)


class Options(msgspec.Struct, frozen=True):
    minutes: float = 10
    seed: int = 1
    rate: float = 200
    recovery: float = 5  # seconds within which everything must work once Redis does
    steps: int | None = None  # maximum steps of the plan
    small: bool = False  # fewer processes, shorter faults, and no wait for reservations and for the last deploys

    @property
    def gateways(self) -> int:
        return 2 if self.small else 3

    @property
    def workers(self) -> int:
        """The workers of each kind, except for `sites`: one host serves the apps."""
        return 1 if self.small else 2

    @property
    def scale(self) -> float:
        """The factor of the durations of faults and pauses."""
        return 0.1 if self.small else 0.25 if self.minutes < 3 else 1.0


class Run:
    def __init__(self, options: Options, folder: Path) -> None:
        self.options, self.folder = options, folder
        self.fleet, self.disturbances = Fleet(), list[Disturbance]()
        self.faults: Counter[str] = Counter()
        self.recoveries: dict[str, list[float]] = defaultdict(list)
        self._provider_key, self._operator = f"provider-{secrets.token_hex(16)}", f"operator-{secrets.token_hex(16)}"
        self._encryption_key = base64.urlsafe_b64encode(os.urandom(32)).decode()
        self._outside_port = free_port()
        self._ports = {f"gateway-{n + 1}": free_port() for n in range(options.gateways)}
        self._apps = f"127.0.0.1:{free_port()}"
        self._generation = 15.0  # seconds; a fault makes the spend of one or two generations inexact
        # With these limits, the hot apps of a generation reach their rate limit, and its capped accounts their cap.
        requests = options.rate * self._generation
        self.limits = max(round(0.05 * requests), 60), max(round(0.03 * requests), 50)  # of an app, and of a user
        self.caps = {"free": round(250 * requests), "max": 10**10}  # nano-euro

    # -- processes -------------------------------------------------------------------------------------------

    def _make_environment(self, servers: Cluster) -> dict[str, str]:
        app, user = self.limits
        outside = f"http://127.0.0.1:{self._outside_port}"
        return {
            "GATEWAY_REDIS_URL": servers.url,
            "GATEWAY_REDIS_WAIT": "1",
            "GATEWAY_BASE_URL": f"http://127.0.0.1:{self._ports['gateway-1']}",
            "GATEWAY_INFERENCE": "on",
            "GATEWAY_PROCESSING_APPROVED": "true",
            "GATEWAY_PROVIDER_URL": f"{outside}/v1",
            "GATEWAY_PROVIDER_KEY": self._provider_key,
            "GATEWAY_PROVIDER_CONCURRENCY": "2000",
            "GATEWAY_PROVIDER_TIMEOUTS": f"total={STREAM_SECONDS},first=10,idle=10",
            "GATEWAY_OPERATOR_TOKEN": self._operator,
            "GATEWAY_ALLOW_PRIVATE_ADDRESSES": "true",
            "GATEWAY_ENCRYPTION_KEY": self._encryption_key,
            "GATEWAY_EMERGENCY_OFF_FILE": str(self.folder / "inference.off"),
            "GATEWAY_STORAGE_URL": f"file://{self.folder / 'data' / 'storage'}",
            "GATEWAY_DATA_DIR": str(self.folder / "data" / "host"),
            "GATEWAY_APPS_LISTEN": self._apps,
            "GATEWAY_RATE_LIMITS": f"app={app},user={user}",
            "GATEWAY_DAILY_CAPS": ",".join(f"{plan}={cap / 10**9:.9f}" for plan, cap in self.caps.items()),
            "GATEWAY_DEPLOY_QUOTAS": "free=1000,max=1000",
            "GATEWAY_WEBHOOK_CLAIM_IDLE": "10",
            "GATEWAY_CANARY": "1",
            "GATEWAY_PROBE_INTERVAL": "30",
            "GATEWAY_LOG_LEVEL": "info",
        }

    def _start_service(self, servers: Cluster) -> None:
        environment, logs = self._make_environment(servers), self.folder / "logs"
        for name, port in self._ports.items():
            self.fleet.add(name, [*python("capsule_gateway"), "serve", "--port", str(port)], environment, logs)
        for kind in (*WORKERS, "sites"):
            constants = {**SMALL, **(SMALL_DEPLOYS if kind == "deploys" else {})} if self.options.small else {}
            for number in range(1, 1 + (1 if kind == "sites" else self.options.workers)):
                self.fleet.add(f"{kind}-{number}", [*python("workers", constants), kind], environment, logs)
        for process in self.fleet.processes.values():
            process.start()

    @contextlib.contextmanager
    def _run_module(self, module: str, *arguments: str, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
        log = (self.folder / "logs" / f"{module.rpartition('.')[2]}.log").open("ab")
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={"PATH": os.environ["PATH"], **environment},
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()
            log.close()

    # -- the run ---------------------------------------------------------------------------------------------

    async def run(self) -> None:
        (self.folder / "logs").mkdir()
        for name in ("data", "data/storage", "data/host"):
            (self.folder / name).mkdir(mode=0o711)
        servers = Cluster(self.folder / "redis")
        gateways = {name: f"http://127.0.0.1:{port}" for name, port in self._ports.items()}
        outside = f"http://127.0.0.1:{self._outside_port}"
        async with contextlib.AsyncExitStack() as stack:
            stack.enter_context(servers.run())
            async with Population(list(gateways.values()), self._operator, outside, self.options.seed) as population:
                keys = self.folder / "keys.json"
                keys.write_text(json.dumps(population.issuer.keys))
                records = str(self.folder / "outside.jsonl")
                arguments = (str(self._outside_port), records, str(keys))
                with self._run_module("tests.chaos.outside", *arguments, PROVIDER_KEY=self._provider_key) as world:
                    self._start_service(servers)
                    try:
                        await self._run_load(servers, population, gateways, world)
                    finally:
                        await self.fleet.stop()
                        await servers.close()
                self._search_files(servers)

    async def _run_load(
        self, servers: Cluster, population: Population, gateways: dict[str, str], world: subprocess.Popen[bytes]
    ) -> None:
        self.population = population
        self.checker = Checker(self.folder, servers, population, self.disturbances, self.limits, self.caps)
        self._secrets = {
            "a prompt": PROMPT.encode(),
            "an answer": COMPLETION.encode(),
            "the provider's key": self._provider_key.encode(),
            "the operator's token": self._operator.encode(),
            "the encryption key": self._encryption_key.encode(),
            "a user's token": population.issuer.header.encode(),
        }
        supervising = asyncio.create_task(self.fleet.supervise())
        callers = await population.create_probe_apps(
            len(await servers.find_primaries()), servers.find_shard, PROBE_APPS
        )
        self.recovery = recovery = Recovery(servers, gateways, callers)
        first = await population.create_generation()
        arguments = (str(self.options.rate), str(self.options.seed), str(self.folder / "answers.jsonl"))
        with self._run_module("tests.chaos.load", *arguments) as load:
            assert load.stdin is not None
            load.stdin.write(msgspec.json.encode(first) + b"\n")
            load.stdin.flush()
            background = [
                asyncio.create_task(work)
                for work in (
                    recovery.watch(),
                    population.emit_events(),
                    population.publish_apps(),
                    self._replace_generations(load),
                    self._check_continuously(servers),
                )
            ]
            faulting = asyncio.create_task(self._run_plan(servers, recovery, world))
            try:
                await asyncio.wait([faulting, supervising, *background], return_when=asyncio.FIRST_COMPLETED)
                for task in (supervising, *background):
                    if task.done():
                        task.result()
                        raise RuntimeError("a part of the run ended early")
                await faulting
                for task in background[1:4]:
                    task.cancel()
                load.stdin.close()
                await asyncio.to_thread(load.wait, 60)
                _print_timed("the load has ended")
                await self._finish()
            finally:
                for task in (*background, supervising, faulting):
                    task.cancel()
                await asyncio.gather(*background, supervising, faulting, return_exceptions=True)

    async def _replace_generations(self, load: subprocess.Popen[bytes]) -> None:
        assert load.stdin is not None
        while True:
            await asyncio.sleep(self._generation)
            generation = await self.population.create_generation()
            load.stdin.write(msgspec.json.encode(generation) + b"\n")
            load.stdin.flush()

    async def _check_continuously(self, servers: Cluster) -> None:
        seconds = 0
        while True:
            end_if_canceled()
            await asyncio.sleep(1)
            seconds += 1
            self.checker.read_records()
            await self.checker.check_caps()
            if seconds % 5 == 0:
                self.checker.judge_requests()
            if seconds % 30 == 0:
                await asyncio.to_thread(self._search_files, servers)

    def _search_files(self, servers: Cluster) -> None:
        service = [path for name in ("logs", "data") for path in (self.folder / name).rglob("*") if path.is_file()]
        logs = {process.log_file for process in self.fleet.processes.values()}
        self.checker.search_files([*service, *servers.list_files()], self._secrets, logs)

    # -- faults ----------------------------------------------------------------------------------------------

    async def _run_plan(self, servers: Cluster, recovery: Recovery, world: subprocess.Popen[bytes]) -> None:
        assert world.stdin is not None
        stdin = world.stdin

        def switch(line: str) -> None:
            stdin.write(f"{line}\n".encode())
            stdin.flush()

        faults = Faults(self.fleet, servers, switch)
        plan = plan_steps(self.options.seed, self.options.scale)
        end = time.monotonic() + self.options.minutes * 60
        await self._wait_for_gateways(recovery)
        for step in islice(plan, self.options.steps):
            if time.monotonic() > end:
                return
            await self._run_step(step, faults, servers, recovery)
            await asyncio.sleep(step.pause)

    async def _wait_for_gateways(self, recovery: Recovery) -> None:
        """Waits until every gateway answers. Raises RuntimeError if one does not within a minute."""
        begin = time.monotonic()
        for name in self._ports:
            if await recovery.measure_gateway(name, begin, 60) is None:
                raise RuntimeError(f"{name} never answered")
        _print_timed("every gateway answers")

    async def _run_step(self, step: Step, faults: Faults, servers: Cluster, recovery: Recovery) -> None:
        async with asyncio.timeout(90):
            while not await servers.is_whole():
                await asyncio.sleep(0.2)
        disturbances = await asyncio.gather(*(self._inject(fault, faults) for fault in step.faults))
        undone = time.monotonic()
        await recovery.wait_for_redis(undone)
        await self._measure_recovery(disturbances, undone, recovery)
        now = time.monotonic()
        for disturbance in disturbances:
            disturbance.end = now
            _print_timed(f"{disturbance.kind} ({disturbance.target}) {now - disturbance.begin:.1f} s")

    async def _inject(self, fault: Fault, faults: Faults) -> Disturbance:
        self.faults[fault.kind] += 1
        async with faults.inject(fault) as disturbance:
            self.disturbances.append(disturbance)
        return disturbance

    async def _measure_recovery(self, disturbances: list[Disturbance], undone: float, recovery: Recovery) -> None:
        """Records the time from when Redis and every killed process run again, and report late recoveries."""
        sinces, limit = [undone], self.options.recovery
        for disturbance in disturbances:
            if disturbance.redis:
                sinces.append(max(recovery.state.since, disturbance.begin))
            elif disturbance.process is not None:
                sinces.append(await self._wait_for_restart(disturbance.process, disturbance.begin))
                limit += START_SECONDS
        if all(disturbance.redis for disturbance in disturbances):
            sinces.remove(undone)  # Redis may have recovered before the fault was undone
        since, kind = max(sinces), " and ".join(disturbance.kind for disturbance in disturbances)
        seconds = await asyncio.gather(*(recovery.measure_gateway(name, since, limit) for name in self._ports))
        for name, took in zip(self._ports, seconds, strict=True):
            if took is None:
                self._report_late(kind, f"{name} did not answer", limit)
            else:
                for disturbance in disturbances:
                    self.recoveries[disturbance.kind].append(took)

    async def _wait_for_restart(self, name: str, killed: float) -> float:
        process = self.fleet.processes[name]
        async with asyncio.timeout(30):
            while not process.started_at > killed:
                await asyncio.sleep(0.05)
        return process.started_at

    def _report_late(self, kind: str, what: str, limit: float) -> None:
        self.checker.add_violations([f"after '{kind}' at {time.monotonic():.0f}, {what} within {limit:g} s"])

    # -- the end ---------------------------------------------------------------------------------------------

    async def _finish(self) -> None:
        """Waits with timeouts for the open work, and runs the final checks."""
        checker = self.checker
        if self.options.small:
            await self._wait_until_none(checker.count_backlog, 40)
            await asyncio.sleep(3)  # for settlements that wait in their gateway
        else:
            await self._wait_until_none(checker.count_backlog, 120)
            await self._wait_until_none(checker.read_reserved, STREAM_SECONDS + 60 + 45)
        _print_timed("all work has ended")
        checker.read_records()
        checker.judge_requests(everything=True)
        self.settled = await checker.check_money(released=not self.options.small)
        if not self.options.small:
            checker.check_exactness()
        await checker.check_events()
        await checker.check_deploys([self._apps], patience=120 if self.options.small else 0)
        for process in self.fleet.processes.values():
            checker.add_violations(process.ends)
        checker.add_violations(self.population.unexpected)

    async def _wait_until_none(self, count: Callable[[], Coroutine[Any, Any, int]], seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while await count():
                    await asyncio.sleep(1)


def _print_timed(what: str) -> None:
    """Prints a line with the time, which shows where a slow run spends it."""
    print(f"{time.monotonic():.0f} {what}", flush=True)


def format_percentile(values: list[float], percent: int) -> str:
    if not values:
        return ""
    return f"{quantiles(values, n=100, method='inclusive')[percent - 1] if len(values) > 1 else values[0]:.2f} s"


def render_table(run: Run) -> str:
    checker, population = run.checker, run.population
    rows: list[tuple[str, ...]] = [("fault", "times", "recovery p50", "p99"), ("---",) * 4]
    everything = {kind: run.recoveries[kind] for kind in sorted(run.faults) if run.faults[kind]}
    everything["**all**"] = [took for several in run.recoveries.values() for took in several]
    for kind, recoveries in everything.items():
        times = run.faults.get(kind, run.faults.total())
        rows.append((kind, str(times), *(format_percentile(recoveries, percent) for percent in (50, 99))))
    facts = {
        "seed, minutes": f"{run.options.seed}, {run.options.minutes:g}",
        "requests": f"{checker.outcomes.total():,}",
        **{f"answered {outcome}": f"{count:,}" for outcome, count in checker.outcomes.most_common()},
        "paid to the provider, nano-euro": f"{checker.paid_total:,}",
        "settled, nano-euro": f"{getattr(run, 'settled', 0):,}",
        "requests whose cost was known exactly": f"{checker.exact:,}",
        "requests whose cost was known within bounds": f"{checker.blurred:,}",
        "accounts whose spend was known exactly": f"{checker.exact_accounts:,} of {checker.judged_accounts:,}",
        "events accepted, received": f"{len(population.events):,}, {len(checker.received):,}",
        "events that were lost, came more than once": f"{checker.lost_events:,}, {checker.duplicates:,}",
        "deploys": f"{len(population.deploys):,}",
        **{f"deploys failed: {error}": f"{count:,}" for error, count in checker.failed_deploys.most_common()},
        "violations": f"{len(checker.violations):,}",
    }
    lines = [f"| {' | '.join(row)} |" for row in rows]
    lines += ["", "| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in facts.items())]
    return "\n".join(lines)
