"""The data of apps in the cluster: a round that tidies deletes nothing that a command still needs."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.accounts.records import App
from gateway.accounts.registry import Registry
from gateway.accounts.vault import Vault
from gateway.data.commands import DataCommands
from gateway.data.records import DataRecords, DataStatus
from gateway.redis.client import Store
from gateway.settings import Settings
from tests.support.processes import ENCRYPTION_KEY
from workers.kubernetes.data_agent import ClusterDataAgent
from workers.kubernetes.objects import ACCOUNT_LABEL, APP_LABEL

APP = App(id="app-1", name="notes", account="acc_1", createdAt="")


@pytest.mark.parametrize("has_data", [True, False])
async def test_an_app_that_is_deleted_during_a_round_keeps_a_last_snapshot(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_data: bool
) -> None:
    registry, deleted = Registry(store, Vault(ENCRYPTION_KEY)), list[tuple[str, str]]()

    async def find_app(_: str) -> None:
        """Finds the app deleted, after the round has begun."""
        if has_data:
            records = DataRecords(store)
            await records.write_statuses([(APP.account, APP.id, DataStatus(usedBytes=1))])
            await DataCommands(store).forget_app(APP, records)

    async def delete(*keys: tuple[str, str]) -> None:
        deleted.extend(keys)

    monkeypatch.setattr(registry, "find_app", find_app)
    labels = {APP_LABEL: APP.id, ACCOUNT_LABEL: APP.account}
    claim = SimpleNamespace(metadata=SimpleNamespace(name="claim", uid="1", labels=labels))
    cluster: Any = SimpleNamespace(present={}, select=lambda _: [claim], delete=delete)
    settings, unused = Settings(data_dir=str(tmp_path)), SimpleNamespace()
    agent = ClusterDataAgent(settings, registry, cluster, unused, unused)  # type: ignore[arg-type]
    await agent._tidy()
    assert (("PersistentVolumeClaim", "claim") in deleted) is not has_data
