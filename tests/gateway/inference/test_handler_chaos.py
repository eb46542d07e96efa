"""Five hundred simultaneous streams, of which browsers leave many and the provider cuts many. Afterwards, the settled
money agrees to the nano-euro with the provider's answers, and nothing stays reserved."""

import asyncio
import contextlib
import random
from dataclasses import dataclass

import pytest

from tests.fakes import FakeAppBackend, FakeProvider
from tests.fakes.provider import DONE, ROLE, answer, chunk, event
from tests.fakes.server import CLOSE, HANG, RESET, Script
from tests.gateway.conftest import Launch
from tests.support.accounts import App
from tests.support.polling import wait_until
from tests.support.prices import cost, max_cost

pytestmark = pytest.mark.asyncio(loop_scope="session")

STREAMS = 500
ACCOUNTS = 10


@dataclass
class Fate:
    """The events of a stream, and the cost that follows from them."""

    script: Script
    cost: int
    listens_to: int | None = None  # tokens after which the browser leaves; None: never


def fate(rng: random.Random, prompt: str) -> Fate:
    usage = (rng.randint(1, 200), rng.randint(1, 500))
    count = rng.randint(1, 12)
    paced: Script = [ROLE, *(step for n in range(count) for step in (chunk(f"w{n}"), rng.random() / 50))]
    match rng.choice(["well"] * 4 + ["left"] * 4 + ["reported", "cut", "error", "refused", "before"]):
        case "well":
            return Fate([*paced, chunk(finish="stop"), chunk(usage=usage), DONE], cost(*usage))
        case "left":
            return Fate([*paced, HANG], max_cost(prompt), rng.randint(1, count))
        case "reported":
            return Fate([chunk("a", usage=usage), HANG], cost(*usage), 1)
        case "cut":
            return Fate([*paced, CLOSE], max_cost(prompt))
        case "error":
            return Fate([*paced, event({"error": {"message": "kaputt"}}), DONE], max_cost(prompt))
        case "refused":
            return Fate(answer(rng.choice([400, 429, 500]), {"error": "no"}), 0)
        case _:
            return Fate([ROLE, rng.choice([CLOSE, RESET])], 0)


async def live(app: App, prompt: str, user: str, listens_to: int | None) -> None:
    """Acts as one browser, from its request until it leaves."""
    heard = 0
    async with app.stream(prompt, token=app.token(user)) as source:
        async for line in source.response.aiter_lines():
            heard += line.startswith('data: {"token"')
            if heard == listens_to:
                return
    assert listens_to is None


async def test_the_settled_money_matches_the_answers(
    launch: Launch, backend: FakeAppBackend, provider: FakeProvider
) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    async with launch(GATEWAY_RATE_LIMITS="app=100000,user=100000") as gw:
        accounts = [await gw.account() for _ in range(ACCOUNTS)]
        apps = [await account.app(backend) for account in accounts for _ in range(2)]
        expected = {account.id: 0 for account in accounts}
        lives = []
        for number in range(STREAMS):
            app = apps[number % len(apps)]
            prompt = f"chaos {seed} {number}"
            its = fate(rng, prompt)
            provider.plays(its.script, prompt=prompt)
            expected[app.account.id] += its.cost
            lives.append(live(app, prompt, f"user-{number % 7}", its.listens_to))
        await asyncio.gather(*lives)
        assert {account.id: await account.settled() for account in accounts} == expected
        assert all(len(provider.asked(f"chaos {seed} {n}")) == 1 for n in range(STREAMS))
        await browsers_leave_at_any_time(apps[0], provider, rng)


async def browsers_leave_at_any_time(app: App, provider: FakeProvider, rng: random.Random) -> None:
    """Leaves at random times. A stream then costs its usage, its maximum, or nothing if it was never sent."""
    before = await app.account.settled()
    used, prompts = cost(50, 50), []

    async def impatient(prompt: str, patience: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(live(app, prompt, "ana", None), patience)

    lives = []
    for _ in range(150):
        script = [ROLE, *[chunk("w"), 0.01] * 10, chunk(finish="stop"), chunk(usage=(50, 50)), DONE]
        prompts.append(provider.plays(script))
        lives.append(impatient(prompts[-1], rng.random()))
    await asyncio.gather(*lives)
    worst = max_cost(prompts[0])

    async def adds_up() -> bool:
        asked = sum(bool(provider.asked(p)) for p in prompts)
        charged = await app.account.settled() - before
        # Each charge is a usage or a maximum cost, so the excess over the usages is a multiple of their difference.
        return asked * used <= charged <= len(prompts) * worst and any(
            (charged - n * used) % (worst - used) == 0 for n in range(asked, len(prompts) + 1)
        )

    await wait_until(adds_up)  # the gateway may still read requests of browsers that left
