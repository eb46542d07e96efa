"""Notes when previews were visited, so that the one that nobody needs makes room (`gateway/deploys/previews.py`)."""

from typing import NoReturn

from gateway.deploys.previews import Previews
from gateway.loops import every
from workers.engine.driver import Driver

VISITS_SECONDS = 60.0  # between two looks


async def keep_noting_visits(previews: Previews, driver: Driver) -> NoReturn:
    async def note() -> None:
        await previews.note_visits(await driver.read_visits())

    await every(VISITS_SECONDS, note, "previews.visits_not_noted", first=VISITS_SECONDS)
