"""One account's requests take no provider from the others; what requests taught, a request ends; and pauses.

`test_health_signs.py` covers what counts as a failure, and `test_providers.py` the choice among providers.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from functools import reduce

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.inference.health import (
    FAILURES,
    ROW_SECONDS,
    SIGNALS,
    Health,
    HealthRecord,
    Observation,
    condense,
)
from gateway.inference.provider.errors import ProviderSignal
from gateway.keys import answers_of_provider_key, failed_accounts_key, provider_key
from gateway.redis.client import Store
from gateway.redis.scripts import CHANGES_CHANNEL
from gateway.settings import DEFAULT_PROVIDER
from tests.support.inference_status import Usable
from tests.support.polling import wait_until
from tests.support.redis_servers import RedisServer
from tests.support.registries import process
from tests.support.tcp_proxy import Proxy


@pytest.fixture
async def pair(redis_url: str, request: pytest.FixtureRequest) -> AsyncIterator[list[Health]]:
    """A provider's health in two processes, which write each change at once, and try it every 0.5 seconds."""
    options = {"answer_refresh": 0.0, "probe_interval": 0.5, "publish_interval": 0.0, **getattr(request, "param", {})}
    async with process(redis_url) as one, process(redis_url) as two:
        yield [Health(DEFAULT_PROVIDER, each, Usable(), **options) for each in (one, two)]


# -- failures in a row -----------------------------------------------------------------------------------------


async def answer(health: Health, store: Store, account: str) -> None:
    health.note_signal(ProviderSignal.COMPLETION, account)
    await wait_until(lambda: store.client.zscore(answers_of_provider_key(DEFAULT_PROVIDER), account))


async def fail(health: Health, account: str, times: int = 1) -> bool:
    """Returns whether the provider is up after so many failures of the account."""
    for _ in range(times):
        health.note_signal(ProviderSignal.FAILED, account)
        assert health._recorder is not None
        await health._recorder
    return health.is_up


async def test_failures_count_if_two_accounts_met_them(pair: list[Health], store: Store) -> None:
    one, two = pair
    await answer(two, store, "other")
    assert await fail(one, "a", FAILURES + 1), "an account takes no provider from the others"
    row = failed_accounts_key(DEFAULT_PROVIDER)
    assert msgspec.json.decode(await store.client.get(row)) == ["a"]
    assert 0 < await store.client.ttl(row) <= ROW_SECONDS
    assert not await fail(two, "b")
    await wait_until(lambda: not one.is_up)
    assert not await store.client.exists(row)


async def test_failures_of_an_account_that_is_alone_count(pair: list[Health], store: Store) -> None:
    """Its own answers do not speak against them. Those of others do for a time, which `list_answers.lua` counts."""
    one, two = pair
    await answer(two, store, "other")
    assert await fail(one, "a", FAILURES)
    await store.client.delete(answers_of_provider_key(DEFAULT_PROVIDER))
    await answer(one, store, "a")
    assert await fail(one, "a", FAILURES - 1), "an answer ends a row"
    assert not await fail(one, "a")


# -- writing ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pair", [{"refusal_seconds": 1.0}], indirect=True)
async def test_refusals_between_completions_change_the_status_once(pair: list[Health], store: Store) -> None:
    """A provider whose quota is nearly used up refuses every other request."""
    health, other = pair
    announced = []
    async with store.client.pubsub() as pubsub:
        await pubsub.subscribe(CHANGES_CHANNEL)
        other.note_signal(ProviderSignal.QUOTA, "a")
        await wait_until(lambda: health.status == other.status == "quota-exhausted")
        for _ in range(20):
            other.note_signal(ProviderSignal.QUOTA, "a")
            await asyncio.sleep(0.05)
            health.note_signal(ProviderSignal.COMPLETION, "a")
            assert other.status == "quota-exhausted"
        await wait_until(lambda: health.is_up and other.is_up)
        while (message := await pubsub.get_message(timeout=0.1)) is not None:
            announced += [message["data"]] if message["type"] == "message" else []
    assert announced == [provider_key(DEFAULT_PROVIDER)] * 2


async def test_refusals_cause_one_probe_at_a_time(redis_url: str) -> None:
    class Refusing(Usable):
        probes, gate = 0, asyncio.Event()

        async def probe(self) -> ProviderSignal | None:  # type: ignore[override]
            self.probes += 1
            await self.gate.wait()
            return ProviderSignal.REACHED

    async with process(redis_url) as registry:
        client = Refusing()
        health = Health(DEFAULT_PROVIDER, registry, client)
        for _ in range(30):
            health.note_signal(ProviderSignal.DENIED, "a")
        await asyncio.sleep(0.01)
        assert client.probes == 1
        client.gate.set()


@pytest.mark.usefixtures("redis_url")
async def test_a_success_during_the_write_of_a_failure_counts(valkey: RedisServer) -> None:
    async with Proxy(valkey.port) as proxy, process(proxy.url) as registry:
        health = Health(DEFAULT_PROVIDER, registry, Usable())
        proxy.hold_requests = b'{"failures":1}'
        health.note_signal(ProviderSignal.FAILED)
        await wait_until(lambda: proxy.held)
        health.note_signal(ProviderSignal.COMPLETION)
        proxy.let_go()
        assert health._recorder is not None
        await asyncio.wait_for(health._recorder, 5)
        assert await registry.store.get(provider_key()) == "{}"


# -- trials ----------------------------------------------------------------------------------------------------


async def test_one_request_of_all_processes_tries_an_unhealthy_provider(pair: list[Health]) -> None:
    for health in pair:
        await fail(health, "a", FAILURES)
    trials, ends = [], time.monotonic() + 2

    async def ask(health: Health) -> None:
        while time.monotonic() < ends:
            if await health.take_trial():
                trials.append(time.monotonic())
            await asyncio.sleep(0.01)

    await asyncio.gather(*(ask(health) for health in pair for _ in range(3)))
    assert 3 <= len(trials) <= 5
    # A busy machine delays some requests after their claim.
    assert all(later - earlier > 0.2 for earlier, later in itertools.pairwise(trials))


@pytest.mark.usefixtures("redis_url")
async def test_without_redis_no_request_tries_a_provider(valkey: RedisServer) -> None:
    async with Proxy(valkey.port) as proxy, process(proxy.url) as registry:
        health = Health(DEFAULT_PROVIDER, registry, Usable(), probe_interval=0.0)
        health._take(HealthRecord(failures=FAILURES))
        proxy.go_down()
        assert health.is_trial_due
        assert not await health.take_trial()


# -- pauses ----------------------------------------------------------------------------------------------------


async def test_a_pause_lasts_a_minute_at_most(pair: list[Health]) -> None:
    one, two = pair
    one.note_signal(ProviderSignal.CONGESTED, "a", 3_600.0)
    await wait_until(lambda: two.is_passed_over)
    assert time.time() + 50 < two._record.passed_over_until / 1000 <= time.time() + 60


async def test_a_pause_of_a_process_whose_clock_is_ahead_ends(redis_url: str) -> None:
    async with process(redis_url) as registry:
        health = Health(DEFAULT_PROVIDER, registry, Usable(), longest_pause=0.2)
        health._take(HealthRecord(passed_over_until=round((time.time() + 3_600) * 1000)))
        assert not health.is_usable
        changed = asyncio.Event()
        health.on_change = changed.set
        await asyncio.wait_for(changed.wait(), 5)
        assert health.is_usable
        assert health.passed_over_until is None


# -- the record ------------------------------------------------------------------------------------------------

ACCOUNTS = ("a", "b", "c")
# Half of them are failures: otherwise three in a row are rare.
SIGNALS_SEEN = st.just(ProviderSignal.FAILED) | st.sampled_from(ProviderSignal)
SEEN = st.builds(Observation, SIGNALS_SEEN, st.sampled_from(ACCOUNTS))
RECORDS = st.builds(
    HealthRecord,
    st.integers(0, FAILURES),
    st.booleans(),
    st.booleans(),
    st.sampled_from([0, 5]),
    st.sampled_from([(), ("a",), ("b", "a")]),
)


@given(st.lists(SEEN, max_size=SIGNALS), RECORDS, st.lists(st.sampled_from(ACCOUNTS), max_size=2))
async def test_condensed_signals_have_the_effect_of_all_of_them(
    seen: list[Observation], before: HealthRecord, answered_lately: list[str]
) -> None:
    """This holds for any health before, because another process may have changed it."""

    def apply(seen: list[Observation]) -> HealthRecord:
        return reduce(lambda health, each: health.after(each, answered_lately), seen, before)

    condensed = condense(seen)
    assert apply(condensed) == apply(seen)
    assert condense([*condense(seen[:8]), *seen[8:]]) == condensed, "they may be condensed one by one"


@given(st.lists(SEEN, max_size=80))
async def test_the_number_of_collected_signals_is_limited(seen: list[Observation]) -> None:
    assert len(condense(seen)) <= SIGNALS
    failures = [Observation(ProviderSignal.FAILED, "a")] * FAILURES
    assert condense([*seen, *failures, *failures])[-FAILURES:] == failures
    answer = Observation(ProviderSignal.COMPLETION, "a")
    later = [each for each in seen if len(condense([answer, each])) == 2]
    assert condense([answer, *later])[0] == answer, "it ends the row of failures before it"


@given(st.lists(SEEN, max_size=30), RECORDS)
async def test_one_accounts_failures_never_make_a_provider_unreachable_for_others(
    seen: list[Observation], before: HealthRecord
) -> None:
    """Account `b` had an answer lately, and nothing but requests of `a` failed."""
    before = msgspec.structs.replace(before, failures=0, accounts=())
    health = before
    for each in seen:
        account = "a" if each.signal is ProviderSignal.FAILED else each.account
        health = health.after(Observation(each.signal, account), ["b", "a"])
        assert health.failures < FAILURES


@given(RECORDS, st.sampled_from([ProviderSignal.REACHED, ProviderSignal.CONGESTED, ProviderSignal.REFUSED]))
async def test_only_an_answer_ends_what_requests_taught(before: HealthRecord, signal: ProviderSignal) -> None:
    after = before.after(Observation(signal))
    assert after.needs_trial == before.needs_trial
    for end in (ProviderSignal.COMPLETION, ProviderSignal.RECOVERED):
        assert before.after(Observation(end)) == HealthRecord(passed_over_until=before.passed_over_until)
