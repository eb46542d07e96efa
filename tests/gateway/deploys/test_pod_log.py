"""The output of start commands on Kubernetes: what is read again after a lost connection, and which apps have some."""

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from gateway.accounts.records import App, Build
from gateway.deploys.pod_log import PodLog
from gateway.deploys.release import Release
from gateway.deploys.serving import Records, Wanted
from gateway.ids import TimeSpan, read_time
from gateway.keys import serving_key
from gateway.redis.client import Store

pytestmark = pytest.mark.asyncio(loop_scope="session")

APP = App(id="app_1", name="notes", account="acc_1", createdAt="")


# A container engine gives nanoseconds.
TIMES = [f"2026-07-02T10:00:00.{part}00000000Z" for part in (1, 2, 2, 2, 3)]
LINES = list(zip(TIMES, "abcde", strict=True))


class CutLog(PodLog):
    """The log of a container, whose connections end after the given numbers of lines. Each begins with all lines."""

    def __init__(self, lines: list[tuple[str, str]], *ends: int) -> None:
        super().__init__("apps", None, poll_seconds=0.05, retry_seconds=0.01)  # type: ignore[arg-type]
        self._lines, self._ends = lines, list(ends)
        self.asked: list[dict[str, Any]] = []

    async def _find_pod(self, deploy_id: str) -> str:
        return "pod"

    async def _read_pod(self, pod: str, **which: Any) -> AsyncIterator[tuple[str, str]]:
        self.asked.append({name: value for name, value in which.items() if name != "follow"})
        for line in self._lines[: self._ends.pop(0)] if self._ends else self._lines:
            yield line


async def find_deploy() -> str:
    return "dep_1"


@pytest.mark.parametrize("ends", [(), (1, 3, 4)])
async def test_lines_of_one_instant_are_all_read_once(ends: tuple[int, ...]) -> None:
    """Some container engines give the same time to all lines that they read at once, such as those of a stack trace."""
    log = CutLog(LINES, *ends)
    rounds, found = iter(range(5)), list[str]()
    async for lines in log.follow(find_deploy, 100, lambda: next(rounds, None) is None):
        found += lines
    assert "".join(found) == "abcde"
    assert log.asked[0]["tail_lines"] == 100
    assert all("since" in which and "tail_lines" not in which for which in log.asked[1:]), "nothing is left out"


async def test_a_span_of_the_output() -> None:
    first, last = read_time("2026-07-02T10:00:00.2Z"), read_time("2026-07-02T10:00:00.3Z")
    log = CutLog(LINES)
    assert await log.tail("dep_1", 10) == [*"abcde"]
    assert await log.tail("dep_1", 10, TimeSpan(since=first)) == [*"bcde"]
    assert await log.tail("dep_1", 2, TimeSpan(first, last)) == [*"cd"]
    assert await log.tail("dep_1", 10, TimeSpan(until=first)) == ["a"]
    assert [*map(sorted, log.asked)] == [["tail_lines"], ["since"], ["since"], ["tail_lines"]]
    assert log.asked[3]["tail_lines"] is None, "the last lines may be later"


async def test_a_start_command_that_was_recognized_is_known_while_it_has_no_pod(store: Store) -> None:
    releases = {"dep_1": Release("d" * 64, 1, runs=True), "dep_2": Release("e" * 64, 1)}
    record = Wanted("acc_1", "app_1", "live", "live", "dep_1", releases=releases)
    await store.client.hset(serving_key("acc_1", "app_1"), "live", msgspec.json.encode(record))  # type: ignore[misc]
    log = PodLog("apps", Records(store))
    assert await log.has_start_command(APP, "dep_1")
    assert not await log.has_start_command(APP, "dep_2")
    assert not await log.has_start_command(APP, None)
    assert not await log.has_start_command(msgspec.structs.replace(APP, build=Build()), "dep_1")
    assert await log.has_start_command(msgspec.structs.replace(APP, build=Build(start="x")), None)
