"""The trace of a delivery that a collector receives from a real worker."""

import time
from pathlib import Path

import pytest

from tests.fakes.collector import HEADER_SECRET, FakeCollector, Span
from tests.fakes.receiver import FakeReceiver
from tests.fakes.server import answer
from tests.support.redis_servers import free_port
from tests.support.worker_process import CRASH, Account, queue

pytestmark = pytest.mark.asyncio(loop_scope="session")

INTERNAL, CLIENT, CONSUMER = 1, 3, 5
PATH = "/hooks/a-path-that-is-secret"


def described(span: Span) -> tuple[str, int, dict[str, object]]:
    return span.name, span.kind, span.attributes


async def test_each_delivery_has_one_trace(tmp_path: Path, receiver: FakeReceiver) -> None:
    async with queue(tmp_path) as running, FakeCollector() as collector:
        await running.worker(**collector.settings())

        async def deliver(account: Account) -> list[Span]:
            return await collector.wait_for_trace("capsule.delivery", await account.emit())

        account = await running.account(receiver.url(f"{PATH}?key=secret-in-the-query"))
        before = time.time_ns()
        root, *stages = await deliver(account)
        whole = {
            "capsule.delivery": receiver.got(f"{PATH}?key=secret-in-the-query")[0].header("x-service-delivery"),
            "capsule.event": CRASH.type,
            "capsule.account": account.id,
            "capsule.app": account.app.name,
            "capsule.outcome": "delivered",
        }
        attempt = {"capsule.attempt": 1, "http.request.method": "POST", "server.address": "127.0.0.1"}
        assert described(root) == ("deliver", CONSUMER, whole)
        assert [described(span) for span in stages] == [
            ("confirm", INTERNAL, {}),
            ("POST", CLIENT, {**attempt, "http.response.status_code": 204}),
            ("record", INTERNAL, {}),
        ]
        assert not any(span.failed for span in (root, *stages))
        assert before < root.began <= stages[0].began
        assert stages[-1].ended <= root.ended < time.time_ns()
        assert root.process["service.name"] == "capsule-workers"

        receiver.plays("/broken", answer(500, {"error": "secret-in-the-answer"}))
        root, _, post, _ = await deliver(await running.account(receiver, "/broken"))
        assert post.attributes == {**attempt, "http.response.status_code": 500, "error.type": "500"}
        assert (root.error, root.failed, post.failed, root.attributes["capsule.outcome"]) == (
            "500",
            True,
            True,
            "failed",
        )

        root, _, post, _ = await deliver(await running.account(f"http://127.0.0.1:{free_port()}{PATH}"))
        assert (root.error, root.failed) == ("connect", True)
        assert post.attributes == {**attempt, "error.type": "connect"}

        root, *stages = await deliver(running.unset_account())
        assert (root.error, root.failed, root.attributes["capsule.outcome"]) == ("no-receiver", False, "dropped")
        assert [span.name for span in stages] == ["confirm", "record"]

        hidden = {PATH, "secret-in", "oom", "exitCode", HEADER_SECRET, *running.confidential}
        assert not [text for text in hidden if text.encode() in collector.raw]
        running.confidential.add(HEADER_SECRET)
