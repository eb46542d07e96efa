"""A worker in a process of its own."""

import asyncio
import multiprocessing
import os
from types import SimpleNamespace

import pytest

from gateway.operations.layout import EXIT_CODE, CannotRun
from workers.child import keep_child, start_child, stop_with_parent


@pytest.mark.asyncio
async def test_the_end_of_the_parent_is_noticed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the loop watched the parent further, it would be busy until the process ends."""
    sentinel, parent = os.pipe()
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: SimpleNamespace(sentinel=sentinel))
    stopped = asyncio.Event()
    stop_with_parent(stopped)
    os.close(parent)
    await asyncio.wait_for(stopped.wait(), 5)
    assert not asyncio.get_running_loop().remove_reader(sentinel)
    os.close(sentinel)


@pytest.mark.parametrize(("code", "error"), [(EXIT_CODE, CannotRun), (3, RuntimeError)])
@pytest.mark.asyncio
async def test_a_child_that_cannot_run_ends_its_parent_with_the_same_code(code: int, error: type[Exception]) -> None:
    child = start_child(int, str(code))
    with pytest.raises(error):
        await asyncio.wait_for(keep_child(child), 10)
