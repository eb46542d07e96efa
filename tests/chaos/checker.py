"""Reads the records, Redis and every file, and passes them to the checks of `books`."""

from __future__ import annotations

import contextlib
import datetime
import json
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import redis
from standardwebhooks import Webhook

from gateway.keys import PARTITION_TAGS, spend_key, stream_key
from tests.chaos import books
from tests.chaos.books import Disturbance, Paid, Received
from tests.chaos.load import Answer
from tests.chaos.nodes import Cluster
from tests.chaos.population import Population

JUDGED_AFTER_SECONDS = 60.0  # after the end of a request, because later faults can affect its settlement
OVERLAP_BYTES = 300  # searched again together with the next part of a file
MAX_VIOLATIONS = 200


class Lines:
    """A growing file of JSON lines."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0

    def read_new(self) -> Iterator[Any]:
        """Yields the lines that were completed since the last call."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                yield json.loads(line)


class Checker:
    def __init__(
        self,
        folder: Path,
        servers: Cluster,
        population: Population,
        faults: list[Disturbance],
        limits: tuple[int, int],
        caps: dict[str, int],
    ) -> None:
        self._servers, self._population, self._faults = servers, population, faults
        self._app_limit, self._user_limit = limits
        self._caps = caps
        self._answers, self._outside = Lines(folder / "answers.jsonl"), Lines(folder / "outside.jsonl")
        self._unjudged: dict[int, Answer] = {}
        self._paid: dict[int, Paid] = {}
        self._bounds: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        self._windows: dict[str, list[tuple[float, float]]] = defaultdict(list)
        self._window_at: dict[str, float] = {}
        self._searched: dict[tuple[str, int], int] = {}
        self.received: list[Received] = []
        self.deploy_events: dict[str, list[tuple[str, str]]] = defaultdict(list)
        self.outcomes: Counter[str] = Counter()
        self.violations: list[str] = []
        self.duplicates = 0
        self.failed_deploys: Counter[str] = Counter()
        self.exact = self.blurred = self.exact_accounts = self.paid_total = self.lost_events = 0

    @property
    def judged_accounts(self) -> int:
        return len(self._bounds)

    def add_violations(self, violations: Iterable[str]) -> None:
        for violation in violations:
            if len(self.violations) < MAX_VIOLATIONS and violation not in self.violations:
                self.violations.append(violation)

    # -- records ---------------------------------------------------------------------------------------------

    def read_records(self) -> None:
        for kind, *fields in self._outside.read_new():
            if kind == "paid":
                paid = Paid(*fields)
                if paid.number:  # 0 is a probe
                    self._paid[paid.number] = paid
                    self.paid_total += paid.cost
            else:
                self._record_event(*fields)
        for fields in self._answers.read_new():
            answer = Answer(*fields)
            self._unjudged[answer.number] = answer
            self.outcomes[f"{answer.status} {answer.code or answer.ending}"] += 1
            if answer.status == 200:
                for name in (f"app {answer.app}", f"user {answer.user} of {answer.app}"):
                    self._windows[name].append((answer.start, answer.first))
                    self._window_at[name] = answer.end

    def _record_event(self, account: str, event: str, at: float, headers: Mapping[str, str], body: str) -> None:
        holder = self._population.accounts.get(account)
        verified = False
        with contextlib.suppress(Exception):  # whatever the library raises, the signature is wrong
            assert holder is not None
            Webhook(holder.webhook_secret).verify(body, dict(headers))
            verified = True
        self.received.append(Received(account, event, at, verified))
        envelope = json.loads(body)
        deploy = envelope["data"].get("deployId")
        if deploy and not envelope["data"].get("sample"):
            self.deploy_events[deploy].append((event, envelope["type"]))

    def judge_requests(self, *, everything: bool = False) -> None:
        """Checks the requests that ended long enough ago, or all of them."""
        now = time.monotonic()
        for number, answer in list(self._unjudged.items()):
            if not everything and now < answer.end + JUDGED_AFTER_SECONDS:
                continue
            del self._unjudged[number]
            paid = self._paid.pop(number, None)
            faults = books.select_during(self._faults, answer.start, answer.end + JUDGED_AFTER_SECONDS)
            self.add_violations(books.check_answer(answer, faults))
            self.add_violations(books.check_unpaid(answer, paid))
            least, most = books.compute_settlement_range(answer, paid, faults)
            self._bounds[answer.account][0] += least
            self._bounds[answer.account][1] += most
            self.exact += least == most
            self.blurred += least != most
        for name, at in list(self._window_at.items()):
            if everything or now > at + JUDGED_AFTER_SECONDS:
                limit = self._app_limit if name.startswith("app") else self._user_limit
                del self._window_at[name]
                self.add_violations(books.check_window(name, self._windows.pop(name), limit))

    # -- Redis -----------------------------------------------------------------------------------------------

    async def read_spend(self, account: str) -> dict[str, tuple[int, int]] | None:
        """Returns the settled and reserved nano-euro by day; None if Redis does not answer."""
        today, found = datetime.datetime.now(datetime.UTC).date(), {}
        for days in (-1, 0, 1):
            day = (today + datetime.timedelta(days=days)).isoformat()
            try:
                settled, reserved = await self._servers.execute("HMGET", spend_key(account, day), "settled", "reserved")
            except redis.RedisError:
                return None
            found[day] = int(settled or 0), int(reserved or 0)
        return found

    async def check_caps(self) -> None:
        for account in list(self._population.current):
            cap = self._caps[account.plan]
            for day, amounts in (await self.read_spend(account.id) or {}).items():
                self.add_violations(books.check_cap(account.id, day, *amounts, cap))

    async def read_reserved(self) -> int:
        """Returns the nano-euro that are still reserved, over all accounts."""
        total = 0
        for account in self._population.accounts:
            total += sum(reserved for _, reserved in (await self.read_spend(account) or {}).values())
        return total

    async def check_money(self, *, released: bool) -> int:
        """Checks every account's spend after the load has ended, and returns the settled nano-euro.

        `released`: every lease has ended.
        """
        total = 0
        for account, (least, most) in self._bounds.items():
            days = await self.read_spend(account)
            if days is None:
                self.add_violations([f"Redis could not be asked what {account} spent"])
                continue
            cap = self._caps[self._population.accounts[account].plan]
            for day, amounts in days.items():
                self.add_violations(books.check_cap(account, day, *amounts, cap))
            settled = sum(amount for amount, _ in days.values())
            reserved = sum(amount for _, amount in days.values())
            self.add_violations(books.check_spend(account, (settled, reserved), least, most))
            if released and reserved:
                self.add_violations(
                    [f"{account} still has {reserved:,} nano-euro reserved after every reservation has expired"]
                )
            total += settled
            self.exact_accounts += least == most
        return total

    def check_exactness(self) -> None:
        """Checks that at least half of the spends are known exactly: wide bounds would hide a wrong settlement."""
        if 2 * self.exact_accounts < self.judged_accounts:
            self.add_violations(
                [f"the spend of only {self.exact_accounts} of {self.judged_accounts} accounts is known exactly"]
            )

    # -- events and deploys ----------------------------------------------------------------------------------

    async def count_backlog(self) -> int:
        """Returns how many events and deploys have not ended; at least 1 if Redis does not answer."""
        try:
            streams = [stream_key(tag, name) for tag in PARTITION_TAGS for name in ("events", "builds")]
            return sum([int(await self._servers.execute("XLEN", stream)) for stream in streams])
        except redis.RedisError:
            return 1

    async def check_events(self) -> None:
        failed: set[str] = set()
        for account in self._population.accounts.values():
            failed |= await self._population.list_failed_events(account)
        accepted = self._population.events
        self.lost_events = len(accepted.keys() - {entry.event for entry in self.received} - failed)
        self.duplicates = sum(count > 1 for count in Counter(entry.event for entry in self.received).values())
        self.add_violations(books.check_events(accepted, self.received, failed, self._faults))

    async def check_deploys(self, hosts: Sequence[str], patience: float) -> None:
        """Checks every deploy. `hosts`: addresses that serve the apps. `patience`: seconds that a deploy may take."""
        final: Counter[str] = Counter()  # deploys by app
        served: dict[str, str] = {}  # app → its last live deploy; an app's deploys are made one after the other
        for name, deploy in self._population.deploys.items():
            ended = await self._population.read_end(name)
            if ended and ended.state not in books.FINAL and time.monotonic() < deploy.at + patience:
                continue
            if ended and ended.state == "failed":
                self.failed_deploys[ended.error] += 1
            events = self.deploy_events[name]
            self.add_violations(books.check_deploy(name, deploy.account.id, ended, deploy.at, events, self._faults))
            if ended and ended.state in books.FINAL:
                final[deploy.app] += 1
                if ended.state == "live":
                    served[deploy.app] = name
        for app, name in served.items():
            for host in hosts if final[app] == self._population.published[app] else ():
                if (page := await self._population.fetch_page(host, app)) != self._population.deploys[name].page:
                    self.add_violations([f"deploy {name} is live, and host {host} answers {page[:60]}"])

    # -- files -----------------------------------------------------------------------------------------------

    def search_files(self, files: Iterable[Path], secrets: Mapping[str, bytes], logs: Collection[Path] = ()) -> None:
        """Searches what was added to each file since the last call. `logs`: those of the service's processes."""
        for path in files:
            with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
                entry = (str(path), path.stat().st_ino)
                file.seek(max(0, self._searched.get(entry, 0) - OVERLAP_BYTES))
                while data := file.read(2**24):
                    self.add_violations(books.check_secrets(path.name, data, secrets))
                    self.add_violations(books.check_log(path.name, data) if path in logs else ())
                    self._searched[entry] = file.tell()
