"""What the driver of a cluster does for all apps together. Its contract is tested in `tests/workers/engine`."""

from pathlib import Path
from typing import Any

import pytest
from lightkube.codecs import from_dict

from gateway.accounts.suspended import SuspendedList
from gateway.deploys.pod_log import DEPLOY_LABEL
from gateway.deploys.release import Release, ReleaseArchive
from gateway.deploys.serving import Wanted
from gateway.redis.client import Store
from gateway.settings import Settings
from tests.support.kubeconfig import write_kubeconfig
from workers.kubernetes import driver as source
from workers.kubernetes.cluster import Cluster, Key
from workers.kubernetes.driver import ClusterDriver
from workers.kubernetes.objects import MANAGED_BY, MANAGER, describe_deployment, describe_secret
from workers.kubernetes.pod import PodRelease

RELEASE = Release("0" * 64, 10, runs=True)
ROUND = 10  # objects


class Looks(dict[Key, Any]):
    """Counts how often an object is looked at."""

    number = 0

    def __getitem__(self, key: Key) -> Any:
        self.number += 1
        return super().__getitem__(key)


async def nothing(*_: object) -> Any:
    return None


async def test_a_round_of_tidying_looks_at_no_more_objects_of_many_apps(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    apps = 100
    monkeypatch.setattr(source, "MAX_TIDIED", ROUND)
    monkeypatch.setenv("KUBECONFIG", str(write_kubeconfig(tmp_path, 1)))
    settings = Settings(data_dir=str(tmp_path), apps_domain="apps.test", kubernetes_image="capsule")
    deleted: list[Key] = []

    async def delete(*keys: Key) -> None:
        deleted.extend(keys)

    async with Cluster("apps") as cluster:
        cluster.present = looks = Looks()
        monkeypatch.setattr(cluster, "delete", delete)
        driver = ClusterDriver(settings, cluster, nothing, SuspendedList(store), nothing, nothing, ("127.0.0.1", 1))
        for number in range(apps):
            app, deploy, served = f"app-{number}", f"dep_{number}", f"dep_{number}s"
            for each in (deploy, served, f"dep_{number}x") if number == 5 else (deploy, served):
                release = PodRelease("acc_1", app, "live", each, ReleaseArchive("", 0), "", runs=True)
                for described in (describe_deployment(release, settings), describe_secret(release, "", {})):
                    cluster._note((described["kind"], described["metadata"]["name"]), from_dict(described))
            driver.note(Wanted("acc_1", app, "live", "check", deploy, served, {deploy: RELEASE, served: RELEASE}))
        labels = {MANAGED_BY: MANAGER, DEPLOY_LABEL: "dep_left"}  # made by others, or damaged
        left = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "dep-left", "labels": labels}}
        cluster._note(("Secret", "dep-left"), from_dict(left))
        deploys = {f"dep_{number}" for number in range(apps)}
        await driver.tidy(set(), deploys)  # begins a turn over all
        for _ in range(2 * 2 * apps // ROUND):
            looks.number = 0
            driver.note(Wanted("acc_1", "app-0", "live", "live", "dep_0", "dep_0s"))
            await driver.tidy(set(), deploys)
            assert looks.number <= ROUND
        assert {*deleted} == {("Deployment", "dep-5x"), ("Secret", "dep-5x"), ("Secret", "dep-left")}
