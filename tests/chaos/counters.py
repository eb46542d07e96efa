"""Apps that count in SQLite, on several hosts. A host that is killed or stands still loses its apps to another one.

Each app answers a POST with its count and the id of its run. The answers show what was lost when another run began, and
whether a run went on after the next one had begun. The processes on the hosts show whether two run at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import aiohttp
import msgspec

from tests.support.deployment import packed
from workers.hosting.watchdog import is_running, read_state

SYNC_SECONDS = 2  # GATEWAY_APP_DATA_SYNC
LOST_SECONDS = 17  # of counts at most: two copies, each of which may take long on a busy machine
TAKEOVER_SECONDS = 60  # in which an app must answer again once nothing is broken
PAUSE_SECONDS = 0.05  # between requests, and between looks at the processes
TIMEOUT = aiohttp.ClientTimeout(total=5)
APP = """
import http.server, json, os, secrets, sqlite3
database = sqlite3.connect(os.environ["DATA_DIR"] + "/counts.db", isolation_level=None)
database.execute("pragma journal_mode=wal")
database.execute("create table if not exists counts (n integer primary key)")
run = secrets.token_hex(8)

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer(database.execute("select count(*) from counts").fetchone()[0])

    def do_POST(self):
        database.execute("insert into counts default values")
        self.do_GET()

    def answer(self, count):
        body = json.dumps({"count": count, "run": run}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass

http.server.HTTPServer(("127.0.0.1", int(os.environ["PORT"])), Handler).serve_forever()
"""


class Answer(msgspec.Struct):
    count: int
    run: str


class Ledger:
    """Judges the answers of one app. The requests come one after another."""

    def __init__(self, app: str, lost_seconds: float) -> None:
        self.app, self._lost_seconds = app, lost_seconds
        self.violations: list[str] = []
        self.runs: list[str] = []
        self.count, self.lost = 0, 0
        self._counted_at: list[float] = [0.0]  # by count

    @property
    def moves(self) -> int:
        return max(len(self.runs) - 1, 0)

    def record(self, answer: Answer, at: float, *, clean: bool = False) -> None:
        """Records the answer to a POST. `clean`: since the last answer, the app has only moved on purpose."""
        kept = answer.count - 1
        if not self.runs or answer.run != self.runs[-1]:
            if answer.run in self.runs:
                self.violations.append(f"{self.app}: an earlier run has answered after a later one")
            self.runs.append(answer.run)
            self._judge_loss(kept, clean=clean)
        elif kept < self.count:
            self.violations.append(f"{self.app}: one run has counted {self.count}, then {answer.count}")
        # Requests without an answer may have been counted.
        del self._counted_at[kept + 1 :]
        self._counted_at += [at] * (answer.count + 1 - len(self._counted_at))
        self.count = answer.count

    def _judge_loss(self, kept: int, *, clean: bool) -> None:
        if kept >= self.count:
            return
        self.lost += self.count - kept
        seconds = self._counted_at[self.count] - self._counted_at[kept + 1]
        if clean:
            self.violations.append(f"{self.app}: {self.count - kept} counts were lost when its host stopped cleanly")
        elif seconds > self._lost_seconds:
            self.violations.append(f"{self.app}: the counts of {seconds:.0f} s were lost, not {self._lost_seconds:g} s")


class Counters:
    def __init__(self, hosts: Sequence[str], folders: Sequence[Path], seed: int, lost_seconds: float) -> None:
        """`hosts`: where each host serves its apps. `folders`: the data folder of each."""
        self._hosts, self._folders, self._lost_seconds = hosts, folders, lost_seconds
        self._chance = random.Random(seed)
        self.ledgers: list[Ledger] = []
        self.violations: list[str] = []
        self._over = False

    async def add(self, publish: Callable[[str, bytes], Awaitable[None]]) -> None:
        """Adds an app. `publish` creates it with this name and source, and waits until it is live."""
        app = f"counter-{secrets.token_hex(4)}"
        await publish(app, packed({"app.py": APP}))
        self.ledgers.append(Ledger(app, self._lost_seconds))

    async def run(self) -> None:
        """Counts until the end."""
        async with aiohttp.ClientSession(timeout=TIMEOUT) as self._session:
            await asyncio.gather(self._watch_processes(), *map(self._count, self.ledgers))

    def end(self) -> None:
        self._over = True

    async def _count(self, ledger: Ledger) -> None:
        while not self._over:
            if (answer := await self._ask(ledger.app)) is not None:
                ledger.record(answer, time.monotonic())
            await asyncio.sleep(PAUSE_SECONDS)

    async def _ask(self, app: str, method: str = "POST", host: str = "") -> Answer | None:
        url, headers = f"http://{host or self._chance.choice(self._hosts)}/", {"Host": f"{app}.apps.localhost"}
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
            async with self._session.request(method, url, headers=headers) as response:
                if response.status == 200:
                    return msgspec.json.decode(await response.read(), type=Answer)
                if response.status != 503:
                    self.violations.append(f"{app}: a request got {response.status}")
        return None

    # -- processes -------------------------------------------------------------------------------------------

    async def _watch_processes(self) -> None:
        while not self._over:
            for ledger in self.ledgers:
                if len(self.find_runners(ledger.app)) > 1:
                    self.violations.append(f"{ledger.app}: two hosts run it at once")
            await asyncio.sleep(PAUSE_SECONDS)

    def find_runners(self, app: str) -> list[int]:
        """Returns the numbers of the hosts on which the app runs."""
        return [number for number, folder in enumerate(self._folders) if self._runs(folder, app)]

    def _runs(self, folder: Path, app: str) -> bool:
        deploys = [path.name for path in (folder / "releases" / app / "live").glob("dep_*")]
        states = [read_state(folder, deploy) for deploy in deploys]
        return any(is_running(state.keeper, state.began) for state in states)

    # -- the end ---------------------------------------------------------------------------------------------

    async def check_end(self, stop: Callable[[int], None]) -> None:
        """Checks that every app answers, and that nothing is lost when its host stops. `stop` stops a host cleanly."""
        async with aiohttp.ClientSession(timeout=TIMEOUT) as self._session:
            for ledger in self.ledgers:
                await self._check_answer(ledger, clean=False)
            for number in {number for ledger in self.ledgers for number in self.find_runners(ledger.app)}:
                moved = [ledger for ledger in self.ledgers if number in self.find_runners(ledger.app)]
                stop(number)
                for ledger in moved:
                    await self._check_answer(ledger, clean=True)
                break
        self.violations += [each for ledger in self.ledgers for each in ledger.violations]

    async def _check_answer(self, ledger: Ledger, *, clean: bool) -> None:
        """Waits for an answer; if `clean`, of another run."""
        last, ends = ledger.runs[-1:], time.monotonic() + TAKEOVER_SECONDS
        while time.monotonic() < ends:
            answer = await self._ask(ledger.app)
            if answer is not None:
                moved = [answer.run] != last
                ledger.record(answer, time.monotonic(), clean=clean)
                if moved or not clean:
                    return
            await asyncio.sleep(PAUSE_SECONDS)
        self.violations.append(
            f"{ledger.app}: no answer within {TAKEOVER_SECONDS} s{' of another host' if clean else ''}"
        )
