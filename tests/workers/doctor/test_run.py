"""All checks together, on a machine that passes them and on others that do not."""

import asyncio
import contextlib
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.keys import WORKERS_KEY, worker_key
from gateway.operations.backlog import GROUPS
from gateway.settings import Settings
from tests.fakes import FakeProvider
from tests.fakes.identity import FakeIdentityProvider
from tests.fakes.mail_server import MailServer
from tests.fakes.receiver import certificate
from tests.fakes.server import FakeServer, answer
from tests.support.command_line import invoke
from tests.support.redis_servers import RedisServer, free_port
from tests.support.stores import opened
from workers.doctor import network
from workers.doctor import run as doctor
from workers.doctor.row import Row
from workers.doctor.run import examine
from workers.webhooks import mailer

OF_THE_MACHINE = ("sandbox", "control groups")  # not each machine that runs tests can confine code


async def rows_of(settings: Settings, seconds: float = 20.0) -> dict[str, Row]:
    found = await examine(settings, seconds)
    assert all(bool(row.action) == (row.state != "ok") for row in found), found
    return {row.check: row for row in found}


def states(found: dict[str, Row], *names: str) -> list[str]:
    return [found[name].state for name in names]


async def test_a_good_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No row is anything but ok, with everything that a service can have."""
    monkeypatch.chdir(tmp_path)
    loop, look_up = asyncio.get_running_loop(), asyncio.get_running_loop().getaddrinfo

    async def find_apps(host: Any, port: Any, **options: Any) -> Sequence[Any]:
        return await look_up("127.0.0.2" if str(host).endswith(".apps.example.com") else host, port, **options)

    monkeypatch.setattr(loop, "getaddrinfo", find_apps)
    context, authority = certificate(tmp_path, "api.example.com", days=20, address="127.0.0.2")
    Path(authority).chmod(0o600)
    (tmp_path / "redis").mkdir()
    async with contextlib.AsyncExitStack() as stack:
        server = stack.enter_context(RedisServer("valkey", "--maxmemory", "500mb", folder=tmp_path / "redis"))
        store = await stack.enter_async_context(opened(server.url))
        for group in GROUPS:
            await store.client.set(worker_key(group, "host-1"), "token", ex=60)
            await store.client.sadd(WORKERS_KEY, f"{group}:host-1")
        provider = await stack.enter_async_context(FakeProvider())
        identity = await stack.enter_async_context(FakeIdentityProvider())
        mail = await stack.enter_async_context(MailServer())
        elsewhere = await stack.enter_async_context(FakeServer())
        elsewhere.reply = answer(200)
        api = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.2", 0, ssl=context)
        await stack.enter_async_context(api)
        monkeypatch.setattr(network, "Client", _allow_private(network.Client))
        settings = Settings(
            redis_url=server.url,
            base_url=f"https://127.0.0.2:{api.sockets[0].getsockname()[1]}",
            ca_file=authority,
            apps_domain="apps.example.com",
            data_dir=str(tmp_path / "data"),
            provider_url=provider.url,
            provider_key=provider.key,
            encryption_key="0123456789abcdef",
            operator_token="0123456789abcdef",
            emergency_off_file=str(tmp_path / "inference.off"),
            oidc_issuer=identity.address,
            smtp_url=mail.url,
            probe_check_url=elsewhere.address,
            upstream=elsewhere.address.removeprefix("http://"),
            apps_listen=f"127.0.0.1:{free_port()}",
        )
        found = await rows_of(settings)
        wrong = [row for row in found.values() if row.state != "ok" and row.check not in OF_THE_MACHINE]
        assert not wrong
        names = {"settings", "redis", "redis persistence", "redis memory", "clock", "layout", "storage", "disk"}
        names |= {"temporary files", "open files", "secret files", "caddy", "port", "encryption key", "operators"}
        names |= {"emergency file", "workers", "data folder", "private addresses", "tls", "dns", "upstream", "provider"}
        names |= {"weak tokens", "sign-in", "mail server", "probe check", "redis version", "redis eviction"}
        assert found.keys() == names | {*OF_THE_MACHINE}
        provider.models_status = 401
        refused = await rows_of(settings)
        assert refused["provider"].state == "fail"
    assert not [path.name for path in (tmp_path / "data").iterdir() if path.name.startswith("doctor")]


def _allow_private(client: Any) -> Any:
    """Lets the doctor ask a server of the test, which only has a private address."""
    return lambda *, allow_private, **options: client(allow_private=True, **options)


async def test_a_machine_that_lacks_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings = Settings(
            redis_url=f"redis://:the-password@127.0.0.1:{free_port()}",
            data_dir=str(tmp_path / "file" / "data"),
            apps_listen=f"127.0.0.1:{taken.getsockname()[1]}",
            base_url="http://api.example.com",
            apps_domain="apps.invalid",
            provider_url=f"http://127.0.0.1:{free_port()}",
            provider_key="the-password",
        )
        found = await rows_of(settings)
    assert states(found, "redis", "storage", "caddy", "port", "tls", "dns", "provider") == ["fail"] * 7
    assert states(found, "encryption key", "operators") == ["warn"] * 2
    assert "the-password" not in repr(found)


async def test_a_pod_that_the_cluster_confines_needs_no_sandbox(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(redis_url=redis_url, data_dir=str(tmp_path), apps_engine="kubernetes", encryption_key="key")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    assert {"sandbox", "cluster"} <= (await rows_of(settings)).keys()  # a builder
    monkeypatch.setattr(doctor, "SERVICE_ACCOUNT", tmp_path)
    found = await rows_of(settings)
    assert "cluster" in found
    assert not {*OF_THE_MACHINE, "data folder"} & found.keys()


async def test_all_servers_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "CONNECT_SECONDS", 0.5)
    monkeypatch.setattr(mailer, "ATTEMPT_SECONDS", 0.5)
    with socket.create_server(("127.0.0.2", 0)) as silent:
        address = f"127.0.0.2:{silent.getsockname()[1]}"
        one = msgspec.structs.replace(Settings().providers[0], url=f"http://{address}", key="key")
        settings = Settings(
            redis_url=f"redis://{address}",
            base_url=f"https://{address}",
            apps_domain="apps.invalid",
            data_dir=str(tmp_path),
            providers_file=tuple(msgspec.structs.replace(one, name=f"p{number}") for number in range(8)),
            oidc_issuer=f"http://{address}",
            smtp_url=f"smtp://{address}",
            probe_check_url=f"http://{address}",
            allow_private_addresses=True,
            trust_builds=True,
        )
        began = time.monotonic()
        found = await rows_of(settings, 3.0)
    assert time.monotonic() - began < 9
    names = [*(f"provider p{number}" for number in range(8)), "redis", "sign-in", "mail server", "probe check"]
    assert states(found, *names) == ["fail"] * len(names)
    assert found["tls"].detail == "127.0.0.2 does not answer: TimeoutError"
    assert found["mail server"].detail == "takes no notices: timeout"


def test_the_command(tmp_path: Path) -> None:
    environment = {"GATEWAY_REDIS_URL": f"redis://127.0.0.1:{free_port()}", "GATEWAY_DATA_DIR": str(tmp_path)}
    code, out, error = invoke(["doctor", "--json"], {**environment, "GATEWAY_DAILY_CAP": "free=0"})
    assert (code, error) == (1, "")
    rows = msgspec.json.decode(out, type=list[Row])
    assert {("redis", "fail"), ("settings", "warn")} <= {(row.check, row.state) for row in rows}


def test_invalid_settings() -> None:
    wrong = {"GATEWAY_OPERATOR_TOKEN": "short", "GATEWAY_REDIS_WAIT": "many"}
    code, out, error = invoke(["doctor", "--json"], wrong)
    rows = msgspec.json.decode(out, type=list[Row])
    assert (code, error, {(row.check, row.state) for row in rows}) == (1, "", {("settings", "fail")})
    assert {row.detail.partition(":")[0] for row in rows} == wrong.keys()
    assert all(row.action for row in rows)
    shown = invoke(["doctor", "--output=table"], {**wrong, "COLUMNS": None})
    assert (shown.code, "CHECK" in shown.out) == (1, True)
