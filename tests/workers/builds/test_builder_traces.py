"""The trace of a deploy that a collector receives from a real worker."""

import pytest

from tests.fakes.collector import HEADER_SECRET, FakeCollector, Span
from tests.support.deployment import Host

pytestmark = pytest.mark.asyncio(loop_scope="session")

INTERNAL, CONSUMER = 1, 5
PAGE = "echo output-of-the-build; mkdir dist; echo text-of-the-page > dist/index.html"


async def test_each_deploy_has_one_trace(own: Host) -> None:
    async with FakeCollector() as collector:
        own.gateway.confidential.add(HEADER_SECRET)
        app = await own.app(build={"command": "sh build.sh", "output": "dist"})
        await own.worker("deploys", **collector.settings())

        async def deploy(script: str, state: str) -> list[Span]:
            deploy_id = await own.publish(app, {"build.sh": script})
            if state == "canceled":
                await own.in_state(deploy_id, "building")
                await own.call("POST", f"/account/deploys/{deploy_id}/cancel")
            assert (await own.over(deploy_id))["state"] == state
            return await collector.wait_for_trace("capsule.deploy", deploy_id)

        root, *stages = await deploy(PAGE, "live")
        assert (root.name, root.kind, root.failed, root.error) == ("deploy", CONSUMER, False, None)
        assert root.attributes.pop("capsule.deploy").startswith("dep_")
        assert root.attributes == {
            "capsule.account": own.account.id,
            "capsule.app": app,
            "capsule.deploy.kind": "live",
            "capsule.deploy.trigger": "upload",
            "capsule.outcome": "live",
        }
        assert [span.name for span in stages] == ["wait", "build", "health", "canary", "finish"]
        assert {(span.kind, span.failed, span.error) for span in stages} == {(INTERNAL, False, None)}
        ends = [moment for span in stages for moment in (span.began, span.ended)]
        assert sorted(ends) == ends

        root, *stages = await deploy("echo output-of-the-build; exit 3", "failed")
        assert [(span.name, span.error, span.failed) for span in (root, *stages)] == [
            ("deploy", "DeployError", True),
            ("wait", None, False),
            ("build", "DeployError", True),
        ]
        assert root.attributes["capsule.outcome"] == "failed"

        root, *stages = await deploy("sleep 120", "canceled")
        assert (root.error, root.failed, stages[-1].name) == ("StaleDeploy", False, "build")

        hidden = {"output-of-the-build", "text-of-the-page", "build.sh", *own.gateway.confidential}
        assert not [text for text in hidden if text.encode() in collector.raw]
