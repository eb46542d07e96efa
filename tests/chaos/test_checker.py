"""Each check finds its violations and accepts what is correct, in records, Redis and files. And the plan of faults."""

import datetime
import json
from collections.abc import AsyncIterator
from dataclasses import astuple, replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from redis.crc import key_slot

from gateway.keys import app_key, partition_tag, spend_key, stream_key
from gateway.redis.client import Store
from tests.chaos import books
from tests.chaos.books import Disturbance, Ended, Paid, Received
from tests.chaos.checker import Checker
from tests.chaos.faults import FAMILIES, plan_steps
from tests.chaos.load import PROMPT, Answer, is_faithful, make_word, max_cost, piece_sizes
from tests.chaos.nodes import Cluster
from tests.chaos.population import Account, Deploy, Population

PAID = Paid(1, 12, 20, whole=True, cut=False)
KILL = Disturbance("kill gateway", "gateway-1", 100, 110)
PRIMARY = Disturbance("kill primary", "redis", 100, 110, redis=True)
RECEIVER = Disturbance("cut receiver", "receiver", 100, 110)
PROVIDER = Disturbance("cut provider", "provider", 100, 110)
SENDER = Disturbance("kill worker", "webhooks-1", 100, 105)
BUILDER = Disturbance("kill worker", "deploys-1", 55, 57)
OWN = {key_slot(name.encode()) for name in (partition_tag("acc"), app_key("app"))}
ELSEWHERE = tuple((slot, slot) for slot in range(16_384) if slot not in OWN)[:100]  # slots of other accounts
OF_OTHERS = replace(PRIMARY, slots=ELSEWHERE)


def answer(ending: str = "done", status: int = 200, code: str = "", *, start: float = 50.0, **fields: object) -> Answer:
    return Answer(1, "acc", "app", 0, 0, True, start, start + 0.1, start + 1, status, code, ending, **fields)  # type: ignore[arg-type]


EXACT, WIDE = (PAID.cost, PAID.cost), (PAID.cost, max_cost())


@pytest.mark.parametrize(
    ("seen", "paid", "faults", "bounds"),
    [
        (answer(), PAID, [], EXACT),
        (answer("refused", 503, "BACKBONE_UNAVAILABLE"), None, [], (0, 0)),
        (answer("left", tokens=3), Paid(1, 12, 5, whole=False, cut=False), [], (max_cost(), max_cost())),
        (answer(start=99.5), PAID, [KILL], WIDE),
        (answer(start=105.0), PAID, [PRIMARY], EXACT),  # settlements are repeated
        (answer(start=99.5), PAID, [replace(KILL, target="gateway-2")], EXACT),
        (answer(start=99.5), PAID, [replace(KILL, kind="stop gateway")], EXACT),
    ],
    ids=["whole", "refused", "left", "killed", "lost primary", "another gateway", "only stopped"],
)
def test_what_an_answer_settles(
    seen: Answer, paid: Paid | None, faults: list[Disturbance], bounds: tuple[int, int]
) -> None:
    assert books.compute_settlement_range(seen, paid, faults) == bounds


def check_spend(amount: int) -> list[str]:
    return books.check_spend("acc", (amount, 0), *EXACT)


def check_failure(ending: str, status: int, code: str, *faults: Disturbance) -> list[str]:
    return books.check_answer(answer(ending, status, code, start=105.0), faults)


def check_event(
    at: float | None, *received: float, given_up: bool = False, fault: Disturbance | None = None
) -> list[str]:
    """Checks an event that was accepted at `at`, if at all, and received at these times."""
    accepted = {} if at is None else {"evt": at}
    entries = [Received("acc", "evt", each, True) for each in received]
    return books.check_events(accepted, entries, {"evt"} if given_up else set(), [fault] if fault else [])


def check_deploy(ended: Ended | None, *events: str, fault: Disturbance | None = None) -> list[str]:
    named = [(event, f"deploy.{event.rstrip('2')}") for event in events]
    return books.check_deploy("dep", "acc", ended, 50.0, named, [fault] if fault else [])


def check_log(line: str) -> list[str]:
    return books.check_secrets("gateway-1.log", line.encode(), {"a prompt": PROMPT.encode(), "a key": b"provider-1"})


STEADY = [(float(n), n + 0.1) for n in range(200)]  # one per second
UNAVAILABLE = ("refused", 503, "BACKBONE_UNAVAILABLE")
PROVIDER_FAILED = ("refused", 502, "PROVIDER_ERROR"), ("error", 200, "PROVIDER_ERROR")
NEVER_RIGHT = ((500, "INTERNAL"), (404, "APP_NOT_FOUND"), (401, "TOKEN_INVALID"), (400, "REQUEST_MALFORMED"))
LIVE, STOPPED = Ended("live", 50.0, 60.0), "the worker stopped during the deploy; deploy again"
SECRETS = (
    *(f'{{"error":"{PROMPT} 000000001"}}', "Authorization: Bearer provider-1"),
    *("csk_0123456789abcdefghijABCD", "Bearer%20csk_0123456789abcdefghijABCD", "whsec_0123456789abcdefghij+/=="),
    "POST /hooks/deploy/0123456789abcdefghij0123456789abcdefghij",
)
CIPHERTEXT = '{"secret":"gAAAAABrCCUUYLy2qPkNcsk_ENdg6MWPDtcsk_yKf474v5hd9IjimkuNnBts8DlDZ72zbdbrsp2JTNYb=="}'

VIOLATIONS = {
    "more is settled": check_spend(PAID.cost + 1),
    "less is settled": check_spend(PAID.cost - 1),
    "above the cap": books.check_cap("acc", "day", 60, 41, 100),
    "below zero": books.check_cap("acc", "day", 60, -1, 100),
    "the provider never gave the answer": books.check_unpaid(answer(), None),
    "another text": books.check_answer(answer(faithful=False), [KILL, PRIMARY]),
    **{f"{code} during faults": check_failure("refused", status, code, KILL, PRIMARY) for status, code in NEVER_RIGHT},
    "cut": check_failure("cut", 200, ""),
    "cut by another fault": check_failure("cut", 200, "", RECEIVER),
    "no answer": check_failure("none", 0, ""),
    "unavailable": check_failure(*UNAVAILABLE),
    "unavailable by others' Redis": check_failure(*UNAVAILABLE, OF_OTHERS),
    **{f"provider: {of[0]}": check_failure(*of, RECEIVER) for of in PROVIDER_FAILED},
    "an overfull window": books.check_window("app", [*STEADY, (100.0, 100.1)], 60),
    "a lost event": check_event(50.0),
    "a lost event for a failed receiver": check_event(105.0, fault=RECEIVER),
    "an event is given up": check_event(105.0, given_up=True),
    "twice by a gateway": check_event(None, 101.0, 120.0, fault=KILL),
    "twice by others' Redis": check_event(None, 101.0, 120.0, fault=OF_OTHERS),
    "twice before the fault": check_event(None, 90.0, 104.0, fault=SENDER),
    "twice before a claim": check_event(None, 101.0, 101.1, fault=PRIMARY),
    "a wrong signature": books.check_events({}, [Received("acc", "evt", 1.0, False)], set(), []),
    "two events of one deploy": check_deploy(LIVE, "succeeded", "succeeded2"),
    "two ends of one deploy": check_deploy(LIVE, "succeeded", "failed"),
    "no event of a deploy": check_deploy(LIVE),
    "a deploy without an end": check_deploy(Ended("canary")),
    "a lost deploy": check_deploy(None),
    "a failed deploy": check_deploy(Ended("failed", 50.0, 60.0, STOPPED), "failed"),
    "a failed deploy after the fault": check_deploy(Ended("failed", 58.5, 60.0, STOPPED), "failed", fault=BUILDER),
    "a failed deploy elsewhere": check_deploy(Ended("failed", 99.0, 110.0, STOPPED), "failed", fault=OF_OTHERS),
    "a deploy's own failure": check_deploy(Ended("failed", 50.0, 60.0, "GET / returned 500"), "failed", fault=BUILDER),
    "a traceback": books.check_log("gateway-1.log", b'{"exception":"Traceback (most recent call last):"}'),
    **{line: check_log(line) for line in SECRETS},
}
ACCEPTED = {
    "at the cap": books.check_cap("acc", "day", 60, 40, 100),
    "cut": check_failure("cut", 200, "", KILL),
    "no answer": check_failure("none", 0, "", KILL),
    "unavailable": check_failure(*UNAVAILABLE, replace(PRIMARY, slots=tuple((slot, slot) for slot in OWN))),
    **{f"provider: {of[0]}": check_failure(*of, PROVIDER) for of in PROVIDER_FAILED},
    "a full window": books.check_window("app", STEADY, 60),
    "an event": check_event(50.0, 51.0),
    "given up for a failed receiver": check_event(105.0, given_up=True, fault=RECEIVER),
    "twice by a sender": check_event(None, 101.0, 120.0, fault=SENDER),
    "twice by a takeover": check_event(None, 101.0, 120.0, fault=PRIMARY),
    "a deploy whose event came twice": check_deploy(LIVE, "succeeded", "succeeded"),
    "a failed deploy": check_deploy(Ended("failed", 50.0, 60.0, STOPPED), "failed", fault=BUILDER),
    "a ciphertext is no key": check_log(CIPHERTEXT),
}


@pytest.mark.parametrize("name", VIOLATIONS)
def test_a_violation_is_seen_once_and_quotes_no_secret(name: str) -> None:
    [found] = VIOLATIONS[name]
    assert not any(secret in found for secret in SECRETS)


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_is_right_or_explained_is_accepted(name: str) -> None:
    assert not ACCEPTED[name]


def test_a_request_counts_only_for_windows_that_hold_it_surely() -> None:
    assert books.count_fullest_window([(float(n), n + 30.0) for n in range(61)]) == 31


def test_the_text_of_an_answer() -> None:
    whole = "".join(make_word(7, place) for place in range(sum(piece_sizes(7))))
    assert is_faithful(7, whole, whole=True)
    assert is_faithful(7, whole[:-5], whole=False)
    assert not is_faithful(7, whole[:-5], whole=True)
    for wrong in (whole[1:], whole.replace("7.1 ", ""), whole + make_word(7, 99), make_word(8, 0)):
        assert not is_faithful(7, wrong, whole=False)


def test_the_plan_of_a_seed_has_every_kind() -> None:
    assert list(islice(plan_steps(7), 200)) == list(islice(plan_steps(7), 200))
    assert list(islice(plan_steps(7), 20)) != list(islice(plan_steps(8), 20))
    family_of = {kind: family for family in FAMILIES for kind in FAMILIES[family]}
    steps = [[fault.kind for fault in step.faults] for step in islice(plan_steps(7), 100)]
    assert {kind for kinds in steps for kind in kinds} == family_of.keys()
    assert {len(kinds) for kinds in steps} == {1, 2}
    assert all(len({family_of[kind] for kind in kinds}) == len(kinds) for kinds in steps)


# -- the records, Redis and files ----------------------------------------------------------------------------

WEBHOOK_SECRET = "whsec_" + "c2VjcmV0" * 4


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
    account = Account("acc_1", "key", "max", WEBHOOK_SECRET)
    population.accounts["acc_1"], population.current, population.account_of["app"] = account, [account], "acc_1"
    servers = SimpleNamespace(execute=store.client.execute_command)
    yield Checker(tmp_path, cast(Cluster, servers), population, [], (2, 2), {"max": 10 * PAID.cost})
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
    await spend(checker, settled * PAID.cost, reserved * PAID.cost)
    checker.read_records()
    checker.judge_requests(everything=True)
    assert await checker.check_money(released=True) == settled * PAID.cost
    assert bool(checker.violations) == bool(violations)
    for text in violations:
        assert any(text in found for found in checker.violations)


async def test_caps_windows_and_open_deploys_are_read(checker: Any, tmp_path: Path) -> None:
    await spend(checker, 9 * PAID.cost, PAID.cost + 1)
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
