"""One account's requests take no provider from the others; what requests taught, a request ends; and pauses.

`test_health_signs.py` covers what counts as a failure, and `test_upstream.py` the choice among providers.
"""

import asyncio
import contextlib
import itertools
import re
import time
from collections.abc import AsyncIterator
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import pytest_asyncio
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from gateway.inference import health as health_module
from gateway.inference import scripts
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
from gateway.keys import failed_accounts_key, provider_key, trial_key
from gateway.redis.scripts import CHANGES_CHANNEL
from gateway.settings import DEFAULT_PROVIDER
from tests.fakes import FakeAppBackend, FakeProvider
from tests.fakes.provider import ROLE, answer, chunk, tokens
from tests.fakes.server import CLOSE
from tests.support.fixtures import module_fixture
from tests.support.gateway_process import Gateway, gateway
from tests.support.inference_status import PUBLISHED_WITHIN_SECONDS, SOON, Usable
from tests.support.polling import wait_until
from tests.support.providers import UNSET, asked, heal, plays, several_providers, states
from tests.support.redis_monitor import Wiretap
from tests.support.redis_servers import RedisServer
from tests.support.registries import process
from tests.support.responses import answered, refused, text_of
from tests.support.tcp_proxy import Proxy

pytestmark = pytest.mark.asyncio(loop_scope="session")

# A call of the script, as MONITOR shows it: its hash, the number of keys, the key, and the account.
RECORDED = re.compile(rb'"%b" "1" "[^"]+" "([^"]*)"' % scripts._RECORD_ANSWER.sha.encode())

OFTEN = {
    **SOON,
    "gateway.inference.health.PROBE_INTERVAL_SECONDS": 0.5,
    "gateway.inference.health.PROBE_HOLD_SECONDS": 1,
}
SETTINGS = {
    "GATEWAY_RATE_LIMITS": "app=100000,user=100000",
    "GATEWAY_PROVIDER_TIMEOUTS": "connect=1,first=5,idle=0.5,total=20",
}


class Pair(NamedTuple):
    """Two gateways on one Redis, and their providers."""

    gateways: tuple[Gateway, Gateway]
    providers: list[FakeProvider]


@contextlib.asynccontextmanager
async def two_gateways(folder: Path, constants: dict[str, float]) -> AsyncIterator[Pair]:
    async with several_providers(folder, constants, **SETTINGS) as (gw, providers):
        options = {**UNSET, **SETTINGS, "GATEWAY_PROVIDERS_FILE": str(folder / "providers.toml")}
        async with gateway(gw.redis.url, providers[0], folder, constants, **options) as twin:
            yield Pair((gw, twin), providers)


@module_fixture
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    async with two_gateways(tmp_path_factory.mktemp("pair"), SOON) as pair:
        yield pair


@module_fixture
async def trying(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    async with two_gateways(tmp_path_factory.mktemp("trying"), OFTEN) as pair:
        yield pair


@pytest_asyncio.fixture(loop_scope="session")
async def pair(running: Pair) -> Pair:
    """No request tries an unhealthy provider for half a minute."""
    await heal(running.gateways[0], running.providers)
    return running


@pytest_asyncio.fixture(loop_scope="session")
async def eager(trying: Pair) -> Pair:
    """A request tries an unhealthy provider every half second."""
    await heal(trying.gateways[0], trying.providers)
    return trying


async def status_of(gw: Gateway, name: str = "one") -> str:
    return (await states(gw))[name]["status"]


async def becomes(gw: Gateway, status: str, name: str = "one") -> None:
    await wait_until(lambda: status_of(gw, name), holds=lambda found: found == status)


async def stays(gw: Gateway, status: str = "operational", name: str = "one") -> None:
    """Waits until a change would have been published."""
    await asyncio.sleep(3 * PUBLISHED_WITHIN_SECONDS)
    assert await status_of(gw, name) == status


async def take_down(pair: Pair, name: str = "one") -> None:
    """Makes a provider unreachable, as failed requests do."""
    gw, _ = pair.gateways
    with gw.redis.client() as client:
        client.set(provider_key(name), msgspec.json.encode(HealthRecord(failures=FAILURES)))
        client.publish(CHANGES_CHANNEL, provider_key(name))
    for each in pair.gateways:
        await becomes(each, "provider-unreachable", name)


# -- failures in a row -----------------------------------------------------------------------------------------


async def test_one_accounts_failures_take_no_provider_from_the_others(pair: Pair, backend: FakeAppBackend) -> None:
    (gw, twin), providers = pair
    other, app = await gw.app(backend), await gw.app(backend)
    assert answered(await other.at(twin).ask(plays(providers, tokens("one"))))["text"] == "one"
    prompt = plays(providers, answer(500), tokens("two"))
    for _ in range(4):
        await app.ask(prompt)
    await stays(gw)
    assert asked(providers, prompt)[0] == 4
    with gw.redis.client() as client:
        assert msgspec.json.decode(client.get(failed_accounts_key("one"))) == [app.account.id]
        assert 0 < client.ttl(failed_accounts_key("one")) <= ROW_SECONDS
    for where in pair.gateways:
        assert answered(await other.at(where).ask(plays(providers, tokens("one"), tokens("two"))))["text"] == "one"


async def test_failures_of_two_accounts_count(pair: Pair, backend: FakeAppBackend) -> None:
    (gw, twin), providers = pair
    other, first, second = [await gw.app(backend) for _ in range(3)]
    answered(await other.ask(plays(providers, tokens("one"))))
    prompt = plays(providers, answer(500), tokens("two"))
    for _ in range(2):
        await first.ask(prompt)
    await stays(gw)
    await second.at(twin).ask(prompt)
    for where in pair.gateways:
        await becomes(where, "provider-unreachable")
        response = await other.at(where).ask(plays(providers, tokens("one"), tokens("two")))
        assert answered(response)["text"] == "two"
    with gw.redis.client() as client:
        assert not client.exists(failed_accounts_key("one"))


async def test_an_account_that_is_alone_needs_no_other_one(pair: Pair, backend: FakeAppBackend) -> None:
    """Its own answers do not speak against its failures."""
    (gw, _), providers = pair
    app = await gw.app(backend)
    answered(await app.ask(plays(providers, tokens("one"))))
    prompt = plays(providers, answer(500), tokens("two"))
    for _ in range(3):
        answered(await app.ask(prompt))
    await becomes(gw, "provider-unreachable")


async def test_an_answer_counts_for_a_limited_time(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After that, the failures of one account count, and one more of them is enough."""
    monkeypatch.setattr(health_module, "PUBLISH_INTERVAL_SECONDS", 0)
    async with process(redis_url) as registry:
        health = Health(DEFAULT_PROVIDER, registry, Usable(), answer_seconds=0.5)

        async def fail(times: int) -> bool:
            for _ in range(times):
                health.note_signal(ProviderSignal.FAILED, "a")
            assert health._recorder is not None
            await health._recorder
            return health.is_up

        health.note_signal(ProviderSignal.COMPLETION, "other")
        assert await fail(FAILURES + 1)
        await asyncio.sleep(0.6)
        assert not await fail(1)


# -- trials ----------------------------------------------------------------------------------------------------


async def test_one_request_of_all_processes_tries_an_unhealthy_provider(eager: Pair, backend: FakeAppBackend) -> None:
    """GET /models succeeds all the time, and does not bring the provider back."""
    (gw, _), providers = eager
    app = await gw.app(backend)
    await take_down(eager)
    prompt, probes = plays(providers, answer(500), tokens("two")), len(providers[0].probes)
    before = gw.wiretap.heard.count(b"provider-trial:one")
    began = time.monotonic()

    async def ask(where: Gateway) -> None:
        while time.monotonic() < began + 2:
            assert answered(await app.at(where).ask(prompt))["text"] == "two"

    await asyncio.gather(*(ask(where) for where in eager.gateways for _ in range(3)))
    trials = [exchange.at for exchange in providers[0].asked(prompt)]
    assert 3 <= len(trials) <= 7
    # A busy machine delays some requests between their claim and their arrival.
    assert all(later - earlier > 0.2 for earlier, later in itertools.pairwise(trials))
    assert len(providers[1].asked(prompt)) > 2 * len(trials), "most requests are no trial"
    claims = gw.wiretap.heard.count(b"provider-trial:one") - before
    assert len(trials) <= claims <= 4 * len(trials), "most requests make no claim"
    assert len(providers[0].probes) > probes
    for where in eager.gateways:
        assert await status_of(where) == "provider-unreachable"
    with gw.redis.client() as client:
        assert client.ttl(trial_key("one")) <= 1


async def test_a_provider_is_back_with_the_first_token(eager: Pair, backend: FakeAppBackend) -> None:
    (gw, twin), providers = eager
    app = await gw.app(backend)
    await take_down(eager)
    gate = asyncio.Event()
    prompt = plays(providers, (ROLE, chunk("a"), gate, *tokens("b")[1:]), tokens("two"))
    running: list[asyncio.Task[Any]] = []

    async def is_tried() -> bool:
        task = asyncio.create_task(app.events(prompt))
        running.append(task)
        await wait_until(lambda: task.done() or providers[0].asked(prompt))
        return bool(providers[0].asked(prompt))

    await wait_until(is_tried)
    for where in (gw, twin):
        await becomes(where, "operational")
    assert asked(providers, prompt)[0] == 1
    assert answered(await app.ask(plays(providers, tokens("one"), tokens("two"))))["text"] == "one"
    gate.set()
    texts = [text_of(await each) for each in running]
    assert texts[-1] == "ab"
    assert set(texts[:-1]) <= {"two"}


@pytest.mark.parametrize("left", ["before a token", "a fault of the request"])
async def test_a_trial_that_shows_nothing_changes_nothing(eager: Pair, backend: FakeAppBackend, left: str) -> None:
    (gw, _), providers = eager
    app = await gw.app(backend)
    await take_down(eager)
    script = (ROLE, CLOSE) if left == "before a token" else tuple(answer(400))
    prompt = plays(providers, script, tokens("two"))

    async def is_tried() -> bool:
        await app.ask(prompt)
        return bool(providers[0].asked(prompt))

    await wait_until(is_tried)
    await stays(gw, "provider-unreachable")


async def test_the_last_provider_is_tried_although_the_first_is_healthy(eager: Pair, backend: FakeAppBackend) -> None:
    """Otherwise it would stay unreachable for as long as the first one has free permits."""
    (gw, _), providers = eager
    app = await gw.app(backend)
    await take_down(eager, "three")
    prompt = plays(providers, tokens("one"), tokens("two"), tokens("three"))

    async def is_back() -> bool:
        answered(await app.ask(prompt))
        return await status_of(gw, "three") == "operational"

    await wait_until(is_back)
    assert asked(providers, prompt)[1:] == [0, 1]


async def test_a_disabled_provider_is_not_tried(eager: Pair, backend: FakeAppBackend) -> None:
    (gw, _), providers = eager
    app = await gw.app(backend)
    await take_down(eager)
    await gw.platform("PUT", "providers/one", {"enabled": False})
    prompt, ends = plays(providers, tokens("one"), tokens("two")), time.monotonic() + 0.8
    while time.monotonic() < ends:
        assert answered(await app.ask(prompt))["text"] == "two"
    assert asked(providers, prompt)[0] == 0


async def test_a_process_records_two_accounts_at_a_time(redis_url: str, valkey: RedisServer) -> None:
    """So that answers cost no round trip each."""
    async with Wiretap(valkey) as tap, process(redis_url) as registry:

        def recorded() -> list[str]:
            return [account.decode() for account in RECORDED.findall(tap.heard)]

        health = Health(DEFAULT_PROVIDER, registry, Usable(), answer_refresh=0.5)
        for account in "aabacdabcd":
            health.note_signal(ProviderSignal.COMPLETION, account)
        await wait_until(lambda: recorded() == ["a", "b"])
        await asyncio.sleep(0.6)
        for account in "ccadc":
            health.note_signal(ProviderSignal.COMPLETION, account)
        await wait_until(lambda: recorded() == ["a", "b", "c", "a"])


@pytest.mark.usefixtures("redis_url")
async def test_without_redis_no_request_tries_a_provider(valkey: RedisServer) -> None:
    async with Proxy(valkey.port) as proxy, process(proxy.url) as registry:
        health = Health(DEFAULT_PROVIDER, registry, Usable(), probe_interval=0.0)
        health._take(HealthRecord(failures=FAILURES))
        proxy.go_down()
        assert health.is_trial_due
        assert not await health.take_trial()


# -- pauses ----------------------------------------------------------------------------------------------------


PAUSE = answer(429, {"error": {"message": "slow down"}}, {"Retry-After": "2"})


async def test_a_pause_lasts_a_minute_at_most(pair: Pair, backend: FakeAppBackend) -> None:
    (gw, _), providers = pair
    app = await gw.app(backend)
    long = answer(429, {"error": {"message": "slow down"}}, {"Retry-After": "3600"})
    answered(await app.ask(plays(providers, long, tokens("two"))))
    with gw.redis.client() as client:

        def read() -> int:
            return msgspec.json.decode(client.get(provider_key("one")), type=HealthRecord).passed_over_until

        until = await wait_until(read)
    assert time.time() + 50 < until / 1000 <= time.time() + 60


async def test_a_paused_provider_is_asked_if_no_other_one_is_healthy(pair: Pair, backend: FakeAppBackend) -> None:
    (gw, _), providers = pair
    app = await gw.app(backend)
    answered(await app.ask(plays(providers, PAUSE, tokens("two"))))
    for name in ("two", "three"):
        await take_down(pair, name)
    assert answered(await app.ask(plays(providers, tokens("one"), tokens("two"))))["text"] == "one"


async def test_a_paused_provider_comes_before_one_that_is_down(pair: Pair, backend: FakeAppBackend) -> None:
    """A request at the one that is down may wait for half a minute."""
    (gw, _), providers = pair
    app = await gw.app(backend)
    for name in ("one", "three"):
        await take_down(pair, name)
    limited = plays(providers, tokens("one"), PAUSE, tokens("three"))
    refused(await app.ask(limited), 503, "PROVIDER_QUOTA_EXHAUSTED")

    async def is_paused() -> bool:
        return bool((await states(gw))["two"]["passedOverUntil"])

    await wait_until(is_paused)
    prompt = plays(providers, tokens("one"), tokens("two"), tokens("three"))
    assert answered(await app.ask(prompt))["text"] == "two"
    assert asked(providers, prompt) == [0, 1, 0]


async def test_a_pause_is_over_when_the_process_hears_of_its_end(redis_url: str) -> None:
    """uvloop's timers end up to half a millisecond early, and the choice is not made again until something changes."""

    async def end_pauses() -> list[bool]:
        async with process(redis_url) as registry:
            health, ended, over = Health(DEFAULT_PROVIDER, registry, Usable()), asyncio.Event(), []

            def note() -> None:
                over.append(health.is_usable)
                ended.set()

            for _ in range(20):
                health.on_change = lambda: None
                health._take(HealthRecord(passed_over_until=round(time.time() * 1000) + 20))
                health.on_change = note
                await ended.wait()
                ended.clear()
            return over

    assert await asyncio.to_thread(uvloop.run, end_pauses()) == [True] * 20


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
