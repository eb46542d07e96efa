"""What each sign means for the request and for the provider, and what ends it: the rows of the table in the docs."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any, NamedTuple

import msgspec
import pytest
import pytest_asyncio

from gateway.inference.health import FAILURES, HEALTHY, HealthRecord
from gateway.keys import provider_key
from gateway.redis.scripts import CHANGES_CHANNEL
from tests.fakes import FakeAppBackend, FakeProvider
from tests.fakes.provider import DONE, ROLE, answer, chunk, event, tokens
from tests.fakes.server import CLOSE, HANG
from tests.support.accounts import App
from tests.support.fixtures import module_fixture
from tests.support.gateway_process import Gateway
from tests.support.inference_status import PUBLISHED_WITHIN_SECONDS, SOON
from tests.support.pages import find_rows, read_page
from tests.support.polling import wait_until
from tests.support.providers import heal, plays, several_providers, states

pytestmark = pytest.mark.asyncio(loop_scope="session")

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
