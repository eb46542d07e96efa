"""The sandbox in which the tests of the workers run code."""

from collections.abc import Iterator

import pytest

from tests.support.sandbox import WAYS, Room, room_of


@pytest.fixture
def room() -> Iterator[Room]:
    with room_of() as room:
        yield room


@pytest.fixture(params=WAYS)
def each_room(request: pytest.FixtureRequest) -> Iterator[Room]:
    """With Landlock (and a user, where there is one), and with a user alone."""
    with room_of(landlock=request.param == "Landlock") as room:
        yield room
