"""The trace of a deploy, as a collector receives it from a real worker."""

from pathlib import Path

from tests.fakes import FakeProvider
from tests.fakes.collector import HEADER_SECRET, FakeCollector, Span
from tests.support.deployment import hosting

INTERNAL, CONSUMER = 1, 5
PAGE = "echo output-of-the-build; mkdir dist; echo text-of-the-page > dist/index.html"


async def test_one_trace_for_each_deploy(tmp_path: Path) -> None:
    async with FakeProvider() as provider, hosting(provider, tmp_path) as host, FakeCollector() as collector:
        host.gateway.confidential.add(HEADER_SECRET)
        app = await host.app(build={"command": "sh build.sh", "output": "dist"})
        await host.worker("deploys", **collector.settings())

        async def deploy(script: str, state: str) -> list[Span]:
            deploy_id = await host.publish(app, {"build.sh": script})
            if state == "canceled":
                await host.in_state(deploy_id, "building")
                await host.call("POST", f"/account/deploys/{deploy_id}/cancel")
            assert (await host.over(deploy_id))["state"] == state
            return await collector.wait_for_trace("capsule.deploy", deploy_id)

        root, *stages = await deploy(PAGE, "live")
        assert (root.name, root.kind, root.failed, root.error) == ("deploy", CONSUMER, False, None)
        assert root.attributes.pop("capsule.deploy").startswith("dep_")
        assert root.attributes == {
            "capsule.account": host.account.id,
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

        root, *stages = await deploy("sleep 30", "canceled")
        assert (root.error, root.failed, stages[-1].name) == ("StaleDeploy", False, "build")

        hidden = {"output-of-the-build", "text-of-the-page", "build.sh", *host.gateway.confidential}
        assert not [text for text in hidden if text.encode() in collector.raw]
