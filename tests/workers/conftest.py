"""The sandboxes in which tests of the workers run code."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

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


@pytest.fixture
def deep_path(tmp_path: Path) -> Iterator[Path]:
    """A folder for others nested too deeply for `shutil.rmtree`, with which pytest later removes `tmp_path`."""
    yield tmp_path
    subprocess.run(["rm", "-rf", tmp_path], check=True)
