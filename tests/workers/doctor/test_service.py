"""The rows about the service's settings, secrets and workers."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.accounts.records import App
from gateway.accounts.vault import Vault
from gateway.deploys.environment import Environments
from gateway.keys import APPS_FOLDER_KEY, WORKERS_KEY, worker_key
from gateway.redis.client import Store
from gateway.settings import Settings
from tests.support.redis_servers import free_port
from workers.doctor import service
from workers.doctor.row import Row
from workers.hosting.releases import Releases


async def test_a_misspelt_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert [row.state async for row in service.check_settings(Settings())] == ["ok"]
    (tmp_path / ".env").write_text("GATEWAY_DAILY_CAP=free=0\n")
    monkeypatch.setenv("GATEWAY_APPS_SERVER", "x")
    doubtful = Settings(provider_url="http://a.example")
    assert [row async for row in service.check_settings(doubtful)] == [
        Row("settings", "warn", "GATEWAY_APPS_SERVER is gone: Caddy serves the apps", "unset it"),
        Row(
            "settings",
            "warn",
            "GATEWAY_DAILY_CAP is unknown, and nothing reads it",
            "did you mean GATEWAY_DAILY_CAPS?",
        ),
        Row(
            "settings",
            "warn",
            "provider default: prompts go there without TLS",
            "use https://, unless it is in your own network",
        ),
    ]


PUBLIC = "https://api.example.com"


@pytest.mark.parametrize(
    ("check", "settings", "state"),
    [
        (service.check_operators, {}, "warn"),
        (service.check_operators, {"operator_token": "x" * 20}, "ok"),
        (service.check_operators, {"operator_tokens": {"ana": "x" * 20}}, "ok"),
        (service.check_operators, {"oidc_operators": ("ana@example.com",)}, "ok"),
        (service.check_private_addresses, {"base_url": PUBLIC, "allow_private_addresses": True}, "fail"),
        (service.check_private_addresses, {"base_url": PUBLIC, "allow_private_addresses": False}, "ok"),
        (service.check_private_addresses, {"allow_private_addresses": True}, "ok"),
        (service.check_emergency_file, {"emergency_off_file": "/nowhere/inference.off"}, "ok"),
        (service.check_emergency_file, {"emergency_off_file": __file__}, "warn"),
    ],
)
async def test_a_setting(check: Callable[[Settings], AsyncIterator[Row]], settings: dict[str, Any], state: str) -> None:
    """An operator can sign in, no private addresses are allowed beside a public one, and inference was not left off."""
    assert [row.state async for row in check(Settings(**settings))] == [state]


async def test_weak_tokens() -> None:
    strong, weak = "0a1b2c3d4e5f60718293", "correctcorrectcorrectcorrectcorrect"
    settings = Settings(operator_token=strong, operator_tokens={"ana": strong}, encryption_key=f"{strong},{strong}")
    assert [row.state async for row in service.check_tokens(settings)] == ["ok"]
    settings = Settings(
        operator_token=weak, operator_tokens={"ana": strong, "bob": weak}, encryption_key=f"{strong}, {weak}"
    )
    rows = [row async for row in service.check_tokens(settings)]
    assert {row.state for row in rows} == {"warn"}
    assert [row.detail.partition(" has ")[0] for row in rows] == [
        "GATEWAY_OPERATOR_TOKEN",
        "the token of bob in GATEWAY_OPERATOR_TOKENS",
        "key 2 of GATEWAY_ENCRYPTION_KEY",
    ]
    assert not any(weak in repr(row) for row in rows)


async def test_secrets_that_no_key_opens(redis_url: str, store: Store) -> None:
    app = App(id="shop", name="shop", account="acc_1", createdAt="2026-07-02T10:00:00.000Z")
    await Environments(store, Vault("old")).change_variables(app, {"A": "1", "B": "2"})
    await Environments(store, Vault("new")).change_variables(app, {"B": "3"})
    for key, state, detail in (
        ("new,old", "ok", "opens all of 2 stored secrets"),
        ("new", "fail", "opens 1 of 2 stored secrets"),
        ("", "fail", "opens 0 of 2 stored secrets"),
    ):
        rows = [row async for row in service.check_encryption_key(Settings(redis_url=redis_url, encryption_key=key))]
        assert [(row.state, row.detail) for row in rows] == [(state, detail)]


async def test_workers_without_a_heartbeat(redis_url: str, store: Store) -> None:
    async def check(engine: str) -> list[tuple[str, str]]:
        settings = Settings(redis_url=redis_url, deploy_engine=engine)
        return [(row.state, row.detail) async for row in service.check_workers(settings)]

    everyone = "none has a heartbeat: webhooks, deploys, monitors, sites"
    assert await check("local") == [("warn", everyone)]
    for group in ("webhooks", "monitors"):
        await store.client.set(worker_key(group, "host-1"), "token", ex=15)
        await store.client.sadd(WORKERS_KEY, f"{group}:host-1")
    await store.client.expire(WORKERS_KEY, 60)
    assert await check("local") == [("warn", "none has a heartbeat: deploys, sites")]
    assert await check("external") == [("ok", "webhooks 1, monitors 1")]


async def test_a_data_folder_that_would_stand_by(redis_url: str, store: Store, tmp_path: Path) -> None:
    async def check(**settings: str) -> list[str]:
        chosen = Settings(redis_url=redis_url, data_dir=str(tmp_path / "data"), **settings)
        return [row.state async for row in service.check_data_folder(chosen)]

    assert await check() == ["ok"]
    assert not (tmp_path / "data").exists()
    releases = Releases(tmp_path / "data")
    releases.create_folders()
    await store.client.set(APPS_FOLDER_KEY, "of another host", ex=60)
    assert await check() == ["fail"]  # the folder has no id yet
    await store.client.set(APPS_FOLDER_KEY, releases.folder_id(), ex=60)
    assert await check() == ["ok"]
    await store.client.set(APPS_FOLDER_KEY, "of another host", ex=60)
    assert await check() == ["fail"]
    assert await check(storage_url="file:///shared") == ["ok"]


async def test_without_redis_nothing_is_said_of_what_is_in_it(tmp_path: Path) -> None:
    settings = Settings(redis_url=f"redis://127.0.0.1:{free_port()}", data_dir=str(tmp_path), encryption_key="key")
    assert [row async for row in service.check_encryption_key(settings)] == [Row("encryption key", "ok", "set")]
    assert [row async for row in service.check_workers(settings)] == []
    assert [row async for row in service.check_data_folder(settings)] == []
