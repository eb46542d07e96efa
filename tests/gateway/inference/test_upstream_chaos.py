"""Load over two gateways while the first provider dies, hangs, flaps and breaks off, and one gateway is killed.

With a healthy second provider, no request fails that had no token yet, and the money agrees to the nano-euro.
"""

import asyncio
import random
import time

import pytest

from tests.fakes import FakeAppBackend, FakeProvider
from tests.fakes.provider import DONE, ROLE, answer, chunk, event
from tests.fakes.server import CLOSE, HANG, RESET, Exchange, Script
from tests.support.gateway_process import gateway
from tests.support.polling import wait_until
from tests.support.prices import cost, max_cost
from tests.support.providers import UNSET, several_providers, states

pytestmark = pytest.mark.asyncio(loop_scope="session")

SECONDS = 10.0
CALLERS = 16
CONSTANTS = {
    "gateway.inference.health.PUBLISH_INTERVAL_SECONDS": 0.1,
    "gateway.inference.health.PROBE_INTERVAL_SECONDS": 0.5,
    "gateway.inference.health.PROBE_HOLD_SECONDS": 1,
    "gateway.inference.health.REFUSAL_SECONDS": 0.3,
}
SETTINGS = {
    "GATEWAY_PROVIDER_TIMEOUTS": "connect=1,first=1.5,idle=3,total=20",
    "GATEWAY_RATE_LIMITS": "app=100000,user=100000",
    "GATEWAY_DAILY_CAPS": "free=0.05,starter=0.50,maker=2,max=1000",
}
USAGE = (11, 5)
WELL: Script = [ROLE, chunk("a"), chunk("b"), chunk(finish="stop"), chunk(usage=USAGE), DONE]


class Moody(FakeProvider):
    """Changes its mood with every request, and is down altogether for a part of the time."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.rng = random.Random(seed)
        self.began = time.monotonic()
        self.cut: set[str] = set()  # prompts whose answer broke off after a token

    def script(self, exchange: Exchange) -> Script:
        usual = super().script(exchange)
        is_down = int(time.monotonic() - self.began) % 3 == 2
        if exchange.path.endswith("/models"):
            return answer(500) if is_down else usual
        match (
            "down"
            if is_down
            else self.rng.choice(["well"] * 6 + ["500", "429", "402", "lost", "silent", "event", "cut"])
        ):
            case "well":
                return WELL
            case "429":
                return answer(429, {"error": {"message": "slow down"}})
            case "402":
                return answer(402)
            case "lost":
                return [self.rng.choice([CLOSE, RESET])]
            case "silent":
                return [HANG]
            case "event":
                return [ROLE, event({"error": {"message": "kaputt"}}), DONE]
            case "cut":
                self.cut.add(exchange.json["messages"][-1]["content"])
                return [ROLE, chunk("a"), 0.02, CLOSE]
        return answer(503)


@pytest.mark.parametrize("seed", [1])
async def test_no_request_fails_before_its_first_token(
    tmp_path_factory: pytest.TempPathFactory, backend: FakeAppBackend, seed: int
) -> None:
    folder = tmp_path_factory.mktemp("chaos")
    async with Moody(seed) as moody:
        fields = {"one": {"url": moody.url}, "two": {"concurrency": 8}}
        async with several_providers(folder, CONSTANTS, fields=fields, **SETTINGS) as (gw, providers):
            for provider in providers[1:]:
                provider.default = WELL
            options = {**UNSET, **SETTINGS, "GATEWAY_PROVIDERS_FILE": str(folder / "providers.toml")}
            async with gateway(gw.redis.url, moody, folder, CONSTANTS, **options) as twin:
                accounts = [await gw.account() for _ in range(4)]
                apps = [await account.app(backend) for account in accounts]
                lost = [await (await gw.account()).app(backend) for _ in range(2)]
                ends = time.monotonic() + SECONDS
                sent: dict[str, int] = {}
                failed: list[str] = []

                async def call(number: int) -> None:
                    app = apps[number % len(apps)]
                    while time.monotonic() < ends:
                        prompt = f"prompt of caller {number} at {time.monotonic_ns()}"
                        response = await app.ask(prompt, stream=bool(number % 2))
                        sent[prompt] = number % len(apps)
                        complete = "event: done" in response.text or response.text.startswith('{"text":"ab"')
                        if not complete and prompt not in moody.cut:
                            failed.append(response.text)

                async def call_the_other(number: int) -> None:
                    with_twin = lost[number % 2].at(twin)
                    while True:
                        await with_twin.ask(f"lost {number} at {time.monotonic_ns()}")

                others = [asyncio.create_task(call_the_other(n)) for n in range(6)]
                calls = [asyncio.create_task(call(n)) for n in range(CALLERS)]
                await asyncio.sleep(SECONDS / 2)
                twin.kill()
                await asyncio.gather(*others, return_exceptions=True)
                await asyncio.gather(*calls)
            assert failed == []
            assert len(sent) > 200
            assert moody.cut, "the answers that broke off after a token"
            await wait_until(lambda: states(gw), holds=lambda rows: rows["one"]["failovers"] > 20)
            for number, account in enumerate(accounts):
                prompts = [prompt for prompt, of in sent.items() if of == number]
                due = sum(max_cost(p) if p in moody.cut else cost(*USAGE) for p in prompts)
                assert await account.settled() == due

            async def is_free() -> bool:
                rows = await states(gw)
                return all(row["permits"]["used"] == 0 for row in rows.values())

            await wait_until(is_free, 40)
            with gw.redis.client() as client:
                client.flushall()  # the killed gateway's reservations, which the monitors worker would settle
