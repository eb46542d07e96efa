"""The checker reports violations in the records, in Redis and in files."""

import datetime
import json
from collections.abc import AsyncIterator
from dataclasses import astuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gateway.keys import spend_key, stream_key
from gateway.redis.client import Store
from tests.chaos.books import Ended
from tests.chaos.checker import Checker
from tests.chaos.load import Answer
from tests.chaos.nodes import Cluster
from tests.chaos.population import Account, Deploy, Population
from tests.chaos.prompts import PROMPT
from tests.support.prices import cost

SECRET = "whsec_" + "c2VjcmV0" * 4
COST = cost(12, 20)


class Serving(Population):
    """Deploys that are all live, and one page at all hosts."""

    page = "new"

    async def read_end(self, deploy: str) -> Ended:
        return Ended("live", 50.0, 60.0)

    async def fetch_page(self, host: str, app: str) -> str:
        return self.page


@pytest.fixture
async def checker(tmp_path: Path, store: Store) -> AsyncIterator[Any]:
    population = Serving([], "operator", "http://outside", seed=1)
    account = Account("acc_1", "key", "max", SECRET)
    population.accounts["acc_1"], population.current, population.account_of["app"] = account, [account], "acc_1"
    servers = SimpleNamespace(execute=store.client.execute_command)
    yield Checker(tmp_path, cast(Cluster, servers), population, [], (2, 2), {"max": 10 * COST})
    await store.client.flushall()


def record(folder: Path, *numbers: int) -> None:
    """Records streams that are complete at the provider and at the caller."""
    with (folder / "outside.jsonl").open("a") as outside, (folder / "answers.jsonl").open("a") as answers:
        for number in numbers:
            answer = Answer(number, "acc_1", "app", 0, 0, True, number, number + 0.1, number + 0.2, 200, "", "done", 3)
            outside.write(json.dumps(["paid", number, 12, 20, True, False]) + "\n")
            answers.write(json.dumps(astuple(answer)) + "\n")


async def spend(checker: Any, settled: int, reserved: int = 0) -> None:
    day = datetime.datetime.now(datetime.UTC).date().isoformat()
    await checker._servers.execute("HSET", spend_key("acc_1", day), "settled", settled, "reserved", reserved)


@pytest.mark.parametrize(
    ("settled", "reserved", "violations"),
    [(2, 0, []), (3, 0, ["more than the most possible"]), (0, 1, ["less than the least possible", "still has"])],
    ids=["correct", "settled twice", "a settlement lost and a reservation left"],
)
async def test_what_is_settled_is_what_was_answered(
    checker: Any, tmp_path: Path, settled: int, reserved: int, violations: list[str]
) -> None:
    record(tmp_path, 1, 2)
    await spend(checker, settled * COST, reserved * COST)
    checker.read_records()
    checker.judge_requests(everything=True)
    assert await checker.check_money(released=True) == settled * COST
    assert bool(checker.violations) == bool(violations)
    for text in violations:
        assert any(text in found for found in checker.violations)


async def test_caps_windows_and_open_deploys_are_read(checker: Any, tmp_path: Path) -> None:
    await spend(checker, 9 * COST, COST + 1)
    await checker.check_caps()
    assert "above its cap" in checker.violations.pop()
    record(tmp_path, 103, 104, 105)
    with (tmp_path / "answers.jsonl").open("a") as file:
        file.write("[2, ")  # the rest of the line comes later
    checker.read_records()
    assert checker.outcomes.total() == 3
    checker.judge_requests(everything=True)
    assert any("passed 3 requests in a minute" in found for found in checker.violations)
    assert await checker.count_backlog() == 0
    await checker._servers.execute("XADD", stream_key("{p19}", "builds"), "*", "deploy", "dep_1")
    assert await checker.count_backlog() == 1


async def test_app_serves_its_last_live_deploy(checker: Any) -> None:
    population = checker._population
    for name in ("old", "new"):
        population.deploys[f"dep_{name}"] = Deploy(population.accounts["acc_1"], "app", name, 50.0)
        checker.deploy_events[f"dep_{name}"] = [(f"evt_{name}", "deploy.succeeded")]
    population.published["app"] = 2
    await checker.check_deploys(["host"], 0)
    assert not checker.violations
    population.page = "old"
    await checker.check_deploys(["host"], 0)
    assert checker.violations == ["deploy dep_new is live, and host host answers old"]


async def test_wrong_signatures_and_secrets_in_growing_files_are_seen(checker: Any, tmp_path: Path) -> None:
    body = json.dumps({"type": "app.crashed", "data": {}})
    headers = {"webhook-id": "evt", "webhook-timestamp": "1", "webhook-signature": "v1,AAAA"}
    (tmp_path / "outside.jsonl").write_text(json.dumps(["received", "acc_1", "evt", 1.0, headers, body]) + "\n")
    checker.read_records()
    assert [entry.verified for entry in checker.received] == [False]
    log, secrets = tmp_path / "gateway-1.log", {"a prompt": PROMPT.encode()}
    log.write_text("nothing to see\n" * 1000 + PROMPT[:6])
    checker.search_files([log], secrets)
    assert not checker.violations
    with log.open("a") as file:
        file.write(PROMPT[6:])  # the word ends in what was added since
    checker.search_files([log], secrets)
    assert checker.violations == ["gateway-1.log holds a prompt"]
