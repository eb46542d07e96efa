"""No request fails during swaps. `test_steps_overlap.py` tests running apps."""

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest_asyncio

from tests.support.hosted_apps import Hosting, swapped_under_load


@pytest_asyncio.fixture
async def served(hosting: Hosting) -> AsyncIterator[Hosting]:
    async with hosting.served():
        yield hosting


async def test_a_file_may_disappear_between_its_check_and_its_opening(served: Hosting) -> None:
    """Releases are swapped as fast as possible, and only the first has the requested file."""
    served.publish("dep_1", {"index.html": "1", "one.js": "one"})
    site, over = served.publish("dep_2", {"index.html": "2"}), threading.Event()

    def swap() -> None:
        while not over.is_set():
            site.undo("dep_2")
            site.swap("dep_2")

    swapping = asyncio.create_task(asyncio.to_thread(swap))
    try:
        for _ in range(50):
            answers = await asyncio.gather(*(served.ask("/one.js") for _ in range(10)))
            assert {(said.status, said.body) for said in answers} == {(200, b"one")}
    finally:
        over.set()
        await swapping


async def test_nothing_fails_while_releases_are_swapped(served: Hosting) -> None:
    """Pages still request a file of the first release that the second does not have."""
    texts = {"dep_1": "one " * 500, "dep_2": "two " * 700}
    for deploy, text in texts.items():
        site = served.publish(deploy, {"index.html": text, f"{deploy}.js": text, "both.js": text})
    paths = ["/", "/both.js", "/some/route", "/dep_1.js"]
    await swapped_under_load(served, site, ("dep_1", "dep_2"), paths, set(texts.values()), swaps=25)
