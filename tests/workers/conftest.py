"""The sandboxes in which tests of the workers run code."""

from collections.abc import Iterator

import pytest

from tests.support.sandbox import WAYS, Room, room_of


@pytest.fixture
def room() -> Iterator[Room]:
    with room_of() as room:
        yield room


@pytest.fixture(params=WAYS)
def each_room(request: pytest.FixtureRequest) -> Iterator[Room]:
    """A room with control groups, and one without."""
    with room_of(measured=request.param == "measured") as room:
        yield room
