"""The scripts of admission, on a clock that a test sets.

Production has no such clock. The test changes a script's text, so that the script reads the time from a key that the
test writes.
"""

import re
from datetime import UTC, datetime
from typing import Any, NamedTuple

import msgspec
import pytest

from gateway.inference.spend.reservations import ReservationRecord
from gateway.redis.client import Script
from tests.support.redis_servers import BINARIES

ON_SERVERS = pytest.mark.parametrize("server", BINARIES, indirect=True)  # for what fakeredis does differently
ON_VALKEY = pytest.mark.parametrize("server", ["valkey"], indirect=True)  # for tests that take many steps
CLOCK = "test:clock"
READING = "redis.call('TIME')"
SECOND = 1_000_000  # the clock counts microseconds
MINUTE = 60 * SECOND
DAY = 86_400 * SECOND
TAG = "{p38}"


def source(name: str, **constants: int) -> str:
    """Returns the script's text. `constants` replaces limits, so that a test does not have to reach production's."""
    text = Script(name).source
    for constant, value in constants.items():
        text, count = re.subn(rf"^(local {constant} = )\S+", rf"\g<1>{value}", text, flags=re.MULTILINE)
        assert count == 1, f"{name}.lua must set {constant} once"
    return text


def on_test_clock(name: str, **constants: int) -> str:
    """Returns the script's text, changed to read the time from the test's key instead of from the server's clock."""
    text = source(name, **constants)
    assert text.count(READING) == 1, f"{name}.lua must read the time once"
    changed = text.replace(READING, f"redis.call('LRANGE', '{CLOCK}', 0, 1)")
    assert not re.search(r"\bTIME\b", re.sub(r"--.*", "", changed))
    return changed


def set_clock(client: Any, clock: int) -> None:
    """Sets the clock, in microseconds."""
    client.pipeline().delete(CLOCK).rpush(CLOCK, clock // SECOND, clock % SECOND).execute()


def at(text: str) -> int:
    """Returns the clock at an ISO time, UTC."""
    moment = datetime.fromisoformat(text).replace(tzinfo=UTC)
    return int(moment.timestamp()) * SECOND + moment.microsecond


def day_of(clock: int) -> str:
    return datetime.fromtimestamp(clock // SECOND, UTC).date().isoformat()


class Reply(NamedTuple):
    verdict: str
    day: str
    app_count: int
    app_frees_in: int  # microseconds until a slot is free
    user_count: int
    user_frees_in: int
    now: int  # milliseconds
    settled: int  # nano-euro of the day, if the cap was checked
    used: int = 0  # nano-euro under the account's cap, before the request
    app_used: int = 0
    user_used: int = 0


class Scripts:
    """The scripts that gateways and the monitors worker call, in one partition."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self._admit = client.register_script(on_test_clock("inference/admit"))
        self._list_expired = client.register_script(on_test_clock("inference/list_expired_reservations"))
        self._settle = client.register_script(on_test_clock("inference/settle"))

    def set_clock(self, clock: int) -> None:
        set_clock(self.client, clock)

    def admit(
        self,
        max_cost: int = 0,
        *,
        app: str = "app",
        user: str = "ana",
        account: str = "acc",
        limits: tuple[int, int] = (30, 20),
        cap: int = 10**9,
        app_cap: int | None = None,
        user_cap: int | None = None,
        reservation: str = "r",
        life: int = 360_000,
        deadline: int = 0,
    ) -> Reply:
        keys = [
            f"{TAG}:window:app:{app}",
            f"{TAG}:window:user:{app}:{user}",
            f"{TAG}:spend:{account}",
            f"{TAG}:reservations",
            f"{TAG}:leases",
        ]
        args = [*limits, max_cost, cap, reservation, account, life, deadline, app]
        if app_cap is not None or user_cap is not None:
            args.append("" if app_cap is None else app_cap)
        if user_cap is not None:
            keys.append(f"{TAG}:spend-by-user:{account}:{app}:{user}")
            args += [user, user_cap]
        verdict, day, *numbers = self._admit(keys, args)
        return Reply(verdict.decode(), day.decode(), *map(int, numbers))

    def settle(self, reservation: str, cost: int) -> int:
        """Returns the nano-euro that were booked, or -1 if none were. A negative cost means the maximum."""
        outcome, booked = self.end(reservation, cost)
        return booked if outcome in ("settled", "recovered") else -1

    def end(self, reservation: str, cost: int, record: ReservationRecord | None = None) -> tuple[str, int]:
        """Returns the settlement's outcome, and the nano-euro that it booked."""
        keys = [f"{TAG}:reservations", f"{TAG}:leases", f"{TAG}:spend", f"{TAG}:settled:{reservation}"]
        known = [] if record is None else [*msgspec.structs.astuple(record)]
        outcome, booked = self._settle(keys, [reservation, "max_cost" if cost < 0 else cost, *known])
        return outcome.decode(), booked

    def list_expired(self, limit: int = 500) -> list[str]:
        return [each.decode() for each in self._list_expired([f"{TAG}:leases"], [limit])]

    # -- records ---------------------------------------------------------------------------------------------

    def spend(self, day: str, account: str = "acc") -> tuple[int, int]:
        """Returns the settled and the reserved nano-euro."""
        settled, reserved = self.client.hmget(f"{TAG}:spend:{account}:{day}", "settled", "reserved")
        return int(settled or 0), int(reserved or 0)

    def spends(self) -> dict[tuple[str, str], tuple[int, int]]:
        """Returns the spends that are not zero, by account and day."""
        names = [key.decode() for key in self.client.keys(f"{TAG}:spend:*")]
        found = {tuple(n.split(":")[2:4]): self.spend(n.split(":")[3], n.split(":")[2]) for n in names}
        return {k: v for k, v in found.items() if v != (0, 0)}

    def app_spends(self) -> dict[tuple[str, str, str], tuple[int, int]]:
        """Returns the spends that are not zero, by account, app and day."""
        found: dict[tuple[str, str, str], tuple[int, int]] = {}
        for key in self.client.keys(f"{TAG}:spend:*"):
            account, day = key.decode().split(":")[2:4]
            fields = {name.decode(): int(value) for name, value in self.client.hgetall(key).items()}
            for app in {name.partition(":")[2] for name in fields} - {""}:
                found[account, app, day] = (fields.get(f"settled:{app}", 0), fields.get(f"reserved:{app}", 0))
        return {k: v for k, v in found.items() if v != (0, 0)}

    def user_spends(self) -> dict[tuple[str, str, str, str], tuple[int, int]]:
        """Returns the spends that are not zero, by account, app, user and day."""
        found = {}
        for key in self.client.keys(f"{TAG}:spend-by-user:*"):
            settled, reserved = self.client.hmget(key, "settled", "reserved")
            found[tuple(key.decode().split(":")[2:])] = (int(settled or 0), int(reserved or 0))
        return {k: v for k, v in found.items() if v != (0, 0)}

    def reservations(self) -> dict[str, tuple[str, str, int]]:
        return {key: (account, day, int(max_cost)) for key, (account, day, max_cost, *_) in self.records().items()}

    def records(self) -> dict[str, list[str]]:
        records = self.client.hgetall(f"{TAG}:reservations")
        return {key.decode(): value.decode().split(" ") for key, value in records.items()}

    def expirations(self) -> dict[str, int]:
        return {key.decode(): int(end) for key, end in self.client.zrange(f"{TAG}:leases", 0, -1, withscores=True)}

    def expiries(self) -> dict[str, int]:
        """Returns every key except the clock, with its time to live in seconds; -1 if it does not expire."""
        names = [key.decode() for key in self.client.keys("*") if key.decode() != CLOCK]
        return {name: self.client.ttl(name) for name in names}
