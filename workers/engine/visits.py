"""Notes when previews were visited, so that the one that nobody needs makes room (`gateway/deploys/previews.py`)."""

from gateway.deploys.previews import Previews
from workers.engine.driver import Driver

VISITS_SECONDS = 60.0  # between two looks


async def note_visits(previews: Previews, driver: Driver) -> None:
    """Raises BackboneUnavailable."""
    await previews.note_visits(await driver.read_visits())
