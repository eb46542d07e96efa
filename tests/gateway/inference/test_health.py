"""What each sign means for the request and for the provider, and what ends it: the rows of the table in the docs.

Then one provider's health without a gateway: whose failures count, how it is written, trials, pauses and the record.
`test_availability.py` has the choice among providers.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial, reduce
from typing import Any, NamedTuple

import msgspec
import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from gateway.inference.health import (
    FAILURES,
    HEALTHY,
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
from tests.fakes import FakeAppBackend, FakeProvider
from tests.fakes.provider import DONE, ROLE, answer, chunk, event, tokens
from tests.fakes.server import CLOSE, HANG
from tests.support.accounts import App
from tests.support.fixtures import module_fixture
from tests.support.gateway_process import Gateway
from tests.support.inference_status import PUBLISHED_WITHIN_SECONDS, SOON, Usable
from tests.support.pages import find_rows, read_page
from tests.support.polling import wait_until
from tests.support.providers import heal, plays, several_providers, states
from tests.support.redis_servers import RedisServer
from tests.support.registries import process
from tests.support.tcp_proxy import Proxy

session = pytest.mark.asyncio(loop_scope="session")

PROBE_SECONDS = 0.3
OFTEN = {
    **SOON,
    "gateway.inference.health.PROBE_INTERVAL_SECONDS": PROBE_SECONDS,
    "gateway.inference.health.PROBE_HOLD_SECONDS": 1,
    "gateway.inference.health.REFUSAL_SECONDS": 0.3,
}
SETTINGS = {
    "GATEWAY_RATE_LIMITS": "app=100000,user=100000",
    "GATEWAY_PROVIDER_TIMEOUTS": "connect=1,first=1,idle=1,total=2",
}
ROWS = {sign: row for sign, *row in find_rows(read_page("docs/providers.md"), "sign")}

LIMIT = 4  # of concurrent requests
PAUSE_SECONDS = 2
PAUSE = {"Retry-After": str(PAUSE_SECONDS)}
MESSAGE = {"error": {"message": "You exceeded your current quota"}}


def names(**fields: Any) -> dict[str, Any]:
    return {"error": {"message": "m", **fields}}


SIGNS: dict[str, tuple[Any, ...]] = {
    "no connection, or one that is lost": (CLOSE,),
    "silence: no byte for `first` or `idle` seconds": (ROLE, HANG),
    "a 5xx": tuple(answer(500)),
    "an answer that cannot be read or breaks off": (ROLE, CLOSE),
    "the same after the first token": (ROLE, chunk("a"), 0.05, CLOSE),
    "503 or 529 with `Retry-After`": tuple(answer(529, headers=PAUSE)),
    "429": tuple(answer(429, MESSAGE)),
    "429 with `Retry-After`": tuple(answer(429, MESSAGE, PAUSE)),
    "429 whose `code` or `type` names a quota": tuple(answer(429, names(code="insufficient_quota"))),
    "402": (ROLE, event(names(code=402)), DONE),
    "401 or 403, then the same for `GET /models`": tuple(answer(403)),
    "400, 413 or 422": tuple(answer(400)),
    "any other 4xx": tuple(answer(404)),
    "keep-alives alone for the total time": (ROLE, *[step for _ in range(15) for step in (b": thinking\n\n", 0.2)]),
    "the total time is over after a token": (ROLE, *[step for _ in range(15) for step in (chunk("a"), 0.2)]),
}


class First(NamedTuple):
    """The first provider, which gives a sign. The second one answers."""

    gateway: Gateway
    providers: list[FakeProvider]
    app: App

    async def row(self) -> dict[str, Any]:
        return (await states(self.gateway))["one"]

    async def limit(self) -> int:
        return (await self.row())["permits"]["limit"]

    async def pause(self) -> str | None:
        return (await self.row())["passedOverUntil"]

    async def becomes(self, status: str) -> None:
        await wait_until(self.row, holds=lambda row: row["status"] == status)

    def record(self) -> HealthRecord:
        with self.gateway.redis.client() as client:
            return msgspec.json.decode(client.get(provider_key("one")), type=HealthRecord)

    async def ask(self, script: Any) -> str:
        """Returns the text of the answer, or the code of the failure."""
        return await self.ask_for(plays(self.providers, script, tokens("two")))

    async def ask_for(self, prompt: str) -> str:
        body = (await self.app.ask(prompt)).json()
        return body["error"]["code"] if "error" in body else body["text"]

    async def repeat(self, script: Any) -> None:
        """Gives the sign, after the first time, as often as failures take a provider down."""
        await asyncio.gather(*(self.ask(script) for _ in range(FAILURES - 1)))


@module_fixture
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Gateway, list[FakeProvider]]]:
    fields = {"one": {"concurrency": LIMIT}}
    async with several_providers(tmp_path_factory.mktemp("signs"), OFTEN, fields=fields, **SETTINGS) as found:
        yield found


@pytest_asyncio.fixture(loop_scope="session")
async def first(running: tuple[Gateway, list[FakeProvider]], backend: FakeAppBackend) -> First:
    await heal(*running)
    first = First(*running, await running[0].app(backend))
    await wait_until(first.limit, holds=lambda limit: limit == LIMIT)
    return first


# -- the request -----------------------------------------------------------------------------------------------

REQUESTS = {
    "goes to the next provider": "two",
    "ends with `PROVIDER_ERROR`": "PROVIDER_ERROR",
    "ends with `PROVIDER_REFUSED`": "PROVIDER_REFUSED",
    "ends with `PROVIDER_TIMEOUT`": "PROVIDER_TIMEOUT",
}

# -- the provider ----------------------------------------------------------------------------------------------


async def check_failed(first: First, script: Any) -> None:
    await wait_until(lambda: first.record().failures == 1)
    if not await first.pause():
        await first.repeat(script)
        await first.becomes("provider-unreachable")


async def check_limited(first: First, script: Any) -> None:
    assert await wait_until(first.limit, holds=lambda limit: limit < LIMIT) >= LIMIT / 2


async def check_passed_over(first: First, script: Any) -> None:
    await wait_until(first.pause)
    assert (await first.row())["status"] == "operational"
    assert await first.ask(tokens("one")) == "two"


async def check_unaffected(first: First, script: Any) -> None:
    await first.repeat(script)
    await asyncio.sleep(3 * PUBLISHED_WITHIN_SECONDS)
    assert first.record() == HEALTHY
    assert await first.limit() == LIMIT


EFFECTS: dict[str, Callable[[First, Any], Awaitable[None]]] = {
    "failed": check_failed,
    "limited": check_limited,
    "passed over": check_passed_over,
    "`quota-exhausted`": lambda first, _: first.becomes("quota-exhausted"),
    "`misconfigured`": lambda first, _: first.becomes("misconfigured"),
    "unaffected": check_unaffected,
}

# -- the end ---------------------------------------------------------------------------------------------------


async def wait_for_a_token(first: First, began: float) -> None:
    """GET /models succeeds all the time."""
    before = (await first.row())["status"]
    await asyncio.sleep(3 * PROBE_SECONDS)
    assert (await first.row())["status"] == before

    async def is_back() -> bool:
        await first.ask(tokens("one"))
        return (await first.row())["status"] == "operational"

    await wait_until(is_back)


async def wait_for_the_time(first: First, began: float) -> None:
    await wait_until(first.pause, holds=lambda until: until is None)
    assert time.monotonic() >= began + PAUSE_SECONDS


async def wait_for_a_probe(first: First, began: float) -> None:
    await asyncio.sleep(3 * PROBE_SECONDS)
    assert await first.ask(tokens("one")) == "two"
    first.providers[0].models_status = 200
    await first.becomes("operational")


ENDS: dict[str, Callable[[First, float], Awaitable[Any]]] = {
    "a first token": wait_for_a_token,
    "the end of that time": wait_for_the_time,
    "`GET /models` succeeds": wait_for_a_probe,
    "it has grown back": lambda first, _: wait_until(first.limit, holds=lambda limit: limit == LIMIT),
}


@session
@pytest.mark.parametrize("sign", dict.fromkeys((*ROWS, *SIGNS)))
async def test_a_sign_means_what_the_page_says(first: First, sign: str) -> None:
    request, provider, until = ROWS[sign]
    script, began = SIGNS[sign], time.monotonic()
    first.providers[0].models_status = 401 if "GET /models" in sign else 200
    assert await first.ask(script) == REQUESTS[request]
    for effect in provider.split(", "):
        await EFFECTS[effect](first, script)
    if until != "–":  # the provider was not healthy all the time
        await ENDS[until](first, began)
    assert await first.ask(tokens("one")) == "one", "it comes first again"


# -- trials ----------------------------------------------------------------------------------------------------


@session
async def test_a_provider_is_back_with_the_first_token_of_a_trial(first: First) -> None:
    """A trial without a token changes nothing."""
    with first.gateway.redis.client() as client:
        client.set(provider_key("one"), msgspec.json.encode(HealthRecord(failures=FAILURES)))
        client.publish(CHANGES_CHANNEL, provider_key("one"))
    await first.becomes("provider-unreachable")

    async def wait_for_trial(script: Any) -> asyncio.Task[str]:
        """Asks until a request tries the provider. One that does not is answered by the second one."""
        while True:
            prompt = plays(first.providers, script, tokens("two"))
            text = asyncio.create_task(first.ask_for(prompt))
            asked = partial(first.providers[0].asked, prompt)
            await wait_until(lambda text=text, asked=asked: text.done() or asked())
            if asked():
                return text
            assert await text == "two"

    assert await (await wait_for_trial(tuple(answer(400)))) == "PROVIDER_REFUSED"
    await asyncio.sleep(3 * PUBLISHED_WITHIN_SECONDS)
    assert (await first.row())["status"] == "provider-unreachable"
    gate = asyncio.Event()
    text = await wait_for_trial((ROLE, chunk("a"), gate, *tokens("b")[1:]))
    await first.becomes("operational")
    gate.set()
    assert await text == "ab"


@pytest.fixture
async def pair(redis_url: str, request: pytest.FixtureRequest) -> AsyncIterator[list[Health]]:
    """A provider's health in two processes, which write each change at once, and try it every 0.5 seconds."""
    options = {"answer_refresh": 0.0, "probe_interval": 0.5, "publish_interval": 0.0, **getattr(request, "param", {})}
    async with process(redis_url) as one, process(redis_url) as two:
        yield [Health(DEFAULT_PROVIDER, each, Usable(), **options) for each in (one, two)]


# -- failures in a row -----------------------------------------------------------------------------------------


async def have_answer(health: Health, store: Store, account: str) -> None:
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
    await have_answer(two, store, "other")
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
    await have_answer(two, store, "other")
    assert await fail(one, "a", FAILURES)
    await store.client.delete(answers_of_provider_key(DEFAULT_PROVIDER))
    await have_answer(one, store, "a")
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
            if message["type"] == "message":
                announced.append(message["data"])
    assert announced == [provider_key(DEFAULT_PROVIDER)] * 2


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
