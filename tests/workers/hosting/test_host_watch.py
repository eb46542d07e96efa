"""A host reports its missing releases and its disk, and holds its place as the engine that serves the apps."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
import structlog

from gateway.accounts.records import App
from gateway.accounts.registry import Registry
from gateway.accounts.vault import Vault
from gateway.cancellation import run_in_background
from gateway.deploys import serving
from gateway.deploys.release import Release
from gateway.deploys.serving import Holder, HostReport, Records, Wanted
from gateway.keys import APPS_FOLDER_KEY, ENGINE_KEY, REPORTS_KEY
from gateway.redis.client import Store
from gateway.settings import Settings
from tests.support.background import in_background
from tests.support.folders import passable_folder
from tests.support.hosted_apps import DOMAIN, Hosting
from tests.support.logs import captured
from tests.support.polling import wait_until
from tests.support.processes import ENCRYPTION_KEY
from workers.engine import reconciler
from workers.engine.names import find_app, find_apps
from workers.engine.reconciler import Reconciler
from workers.engine.steps import ReleaseSteps
from workers.hosting import hold_engine, host_watch
from workers.hosting.driver import HostDriver
from workers.hosting.hold_engine import HostHold, ServedElsewhere
from workers.hosting.host_watch import HostWatch, read_certificate_left
from workers.sandbox.removal import remove_folder


class Machine:
    """A host with two served apps, whose steps repeat quickly."""

    def __init__(self, hosting: Hosting, store: Store, registry: Registry) -> None:
        self.hosting, self.store, self.registry = hosting, store, registry
        self.settings = Settings(data_dir=str(hosting.folder), apps_domain=DOMAIN)
        find = partial(find_app, registry)
        self.driver = HostDriver(self.settings)
        steps = ReleaseSteps(self.driver, find, partial(find_apps, registry), self.settings)
        self.records = Records(store, hosting.releases.folder_id())
        self.reconciler = Reconciler(
            self.records, steps, find, 1.0, poll_seconds=0.1, resync_seconds=0.1, tidy_seconds=0.1
        )
        self.lease = HostHold(self.records, hosting.folder, hosting.releases.folder_id())
        self.watch = HostWatch(self.settings, store, hosting.releases, self.reconciler, self.lease, watch_seconds=0.05)

    async def serve(self, name: str) -> App:
        account, _ = await self.registry.create_account("Account", "free")
        app = await self.registry.put_app(App(id=name, name=name, account=account.id, createdAt=""), None)
        deploy = msgspec.structs.replace(self.hosting.deploy(f"dep_{name}", name), account=account.id)
        self.hosting.build(deploy, {"index.html": name}).swap(deploy.id)
        wanted = Wanted(account.id, app.id, "live", "live", deploy.id, "", {deploy.id: Release("digest", 1)})
        await self.records.write("", wanted, "")
        return app

    def release(self, name: str) -> Any:
        return self.hosting.releases.find_site(name).release(f"dep_{name}")

    async def until_applied(self) -> None:
        """Waits until no step is in progress, so that a release that is lost from now on counts as missing."""
        steps = self.reconciler._steps
        await wait_until(lambda: self.reconciler.is_synced and all(step.is_over for step in steps.values()))

    async def report(self) -> HostReport:
        await self.watch.report()
        seconds, _ = await self.store.client.time()
        (report,) = await Records(self.store).read_reports(seconds * 1000)
        return report


@pytest_asyncio.fixture
async def machine(store: Store) -> AsyncIterator[Machine]:
    with passable_folder() as folder:
        machine = Machine(Hosting(folder), store, Registry(store, Vault(ENCRYPTION_KEY)))
        async with aclosing(machine.reconciler):
            yield machine


async def test_missing_releases_are_one_line_until_they_are_back(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two", "gone"):
        await machine.serve(name)
    async with run_in_background(machine.reconciler.run()):
        await machine.until_applied()
        with captured(host_watch) as lines, monkeypatch.context() as patch:
            patch.setattr(reconciler, "logger", structlog.get_logger())
            assert (await machine.report()).missing == 0
            for name in ("one", "two", "gone"):
                remove_folder(machine.release(name))
            await machine.store.client.delete(*[key async for key in machine.store.client.scan_iter("*:serving:gone")])
            assert (await machine.report()).missing == 0, "a swap may be in progress"
            for _ in range(2):
                assert (await machine.report()).missing == 2
            assert [(line["event"], line["addresses"], line["apps"]) for line in lines] == [
                ("sites.releases_missing", 2, ["one", "two"])
            ]
            for name in ("one", "two"):
                machine.release(name).mkdir()
            assert (await machine.report()).missing == 0
            assert [line["event"] for line in lines] == ["sites.releases_missing", "sites.releases_missing.ended"]


async def test_a_full_disk_is_reported(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before Caddy's first start, there is no certificate."""
    assert await read_certificate_left(machine.hosting.folder, "api.example.com") is None
    with captured(host_watch) as lines:
        assert 0 < (await machine.report()).disk_free < 1
        monkeypatch.setattr(host_watch, "LOW_DISK", 1.0)
        await machine.report()
        await machine.report()
        monkeypatch.setattr(host_watch, "LOW_DISK", 0.0)
        await machine.report()
        unknown = shutil.disk_usage("/proc")
        assert unknown.total == 0
        monkeypatch.setattr(shutil, "disk_usage", lambda _: unknown)
        assert (await machine.report()).disk_free == 1.0
    assert [line["event"] for line in lines] == ["disk.low", "disk.low.ended"]


async def test_a_dead_hosts_report_is_forgotten(machine: Machine) -> None:
    report = await machine.report()
    assert await Records(machine.store).read_reports(report.at + 91_000) == []
    assert await machine.store.client.hlen(REPORTS_KEY) == 0


CLUSTER = Holder("worker", "a Kubernetes cluster (namespace apps)")


def hold_of(store: Store, host: str, *, shared: bool = True) -> HostHold:
    records = Records(store, "" if shared else host)
    return HostHold(records, Path("/data") / host, host, renewal_seconds=0.02, folder_poll_seconds=0.02)


async def test_one_host_serves_at_a_time(store: Store) -> None:
    first, again, other = (hold_of(store, host) for host in ("a", "a", "b"))
    await first.take()
    await again.take()  # the next worker on the same folder does not wait until the hold ends
    with pytest.raises(ServedElsewhere, match=r"served by the host \S+ \(data folder /data/a\).*docs/kubernetes.md"):
        await other.take()
    assert await Records(store).has_engine()
    await again.leave()
    assert not await Records(store).has_engine()
    await other.take()
    with pytest.raises(ServedElsewhere, match="/data/b"):
        await first.take()
    await first.leave()  # it is not its own
    assert await Records(store).has_engine()
    await other.leave()


async def test_a_host_is_told_when_a_cluster_has_taken_over(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "HOLD_SECONDS", 0.2)
    hold = hold_of(store, "a")
    await hold.take()
    async with in_background(hold.keep()) as keeping:
        await asyncio.sleep(0.5)
        assert not keeping.done(), "it keeps the place"
        await store.client.set(ENGINE_KEY, msgspec.json.encode(CLUSTER), px=5_000)  # as if it had stood still
        await wait_until(keeping.done)
        with pytest.raises(ServedElsewhere, match="a Kubernetes cluster"):
            keeping.result()


async def test_a_host_without_the_apps_waits_until_they_are_gone(store: Store) -> None:
    had, empty = (hold_of(store, host, shared=False) for host in ("a", "b"))
    await had.take()
    with pytest.raises(ServedElsewhere):
        await empty.take()
    await had.leave()
    with captured(hold_engine) as lines:
        await empty.take()
        await empty.take()
    assert [line["event"] for line in lines] == ["sites.elsewhere"]
    assert empty.is_elsewhere
    assert await Records(store, "b").is_elsewhere()
    assert not await Records(store, "a").is_elsewhere()
    assert not await Records(store).has_engine()
    async with in_background(empty.keep()), in_background(empty.until_here()) as waiting:
        await asyncio.sleep(0.1)
        assert not waiting.done()
        await store.client.delete(APPS_FOLDER_KEY)
        await wait_until(waiting.done)
    assert await Records(store).has_engine()
    await empty.leave()
