"""Tasks that run in the background, and how they end."""

import asyncio

from gateway.cancellation import RunningTasks
from tests.support.polling import wait_until


async def test_of_tasks_with_a_name_one_runs_at_a_time() -> None:
    tasks, ended, go_on = RunningTasks(), list[str](), asyncio.Event()

    async def work(what: str) -> None:
        try:
            await go_on.wait()
        finally:
            ended.append(what)

    for what in ("first", "second"):
        tasks.start(work(what), "name")
        tasks.start(work(f"{what} without a name"))
    assert len(tasks) == 3
    go_on.set()
    await wait_until(lambda: not tasks)
    assert sorted(ended) == ["first", "first without a name", "second without a name"]
    go_on.clear()
    tasks.start(work("again"), "name")
    await asyncio.sleep(0)
    await tasks.cancel()
    assert ended[-1] == "again"
    assert not tasks
