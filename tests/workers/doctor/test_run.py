"""All checks together, on a machine that passes them and on others that do not, and then each alone."""

import asyncio
import contextlib
import resource
import socket
import ssl
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.accounts.records import App
from gateway.accounts.vault import Vault
from gateway.deploys.environment import Environments
from gateway.keys import APPS_FOLDER_KEY, LAYOUT_KEY, WORKERS_KEY, worker_key
from gateway.operations.backlog import GROUPS
from gateway.redis.client import Store
from gateway.settings import ProviderSettings, Settings
from tests.fakes import FakeProvider
from tests.fakes.identity import FakeIdentityProvider
from tests.fakes.mail_server import MailServer
from tests.fakes.receiver import certificate
from tests.fakes.server import FakeServer, answer
from tests.support.command_line import invoke
from tests.support.folders import passable_folder
from tests.support.redis_servers import RedisServer, free_port
from tests.support.stores import opened
from workers.doctor import machine, network, service
from workers.doctor import run as doctor
from workers.doctor.redis import check_redis
from workers.doctor.row import Row
from workers.doctor.run import examine
from workers.hosting.releases import Releases

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
            data_dir=str(tmp_path / "new" / "data"),
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
    assert not (tmp_path / "new").exists(), "a check leaves nothing"


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
            oidc_issuer=f"http://127.0.0.1:{free_port()}",
            smtp_url=f"smtp://127.0.0.1:{free_port()}",
            probe_check_url=f"http://127.0.0.1:{free_port()}",
            allow_private_addresses=True,
        )
        found = await rows_of(settings)
    wrong = ("redis", "storage", "caddy", "port", "tls", "dns", "provider", "sign-in", "mail server", "probe check")
    assert states(found, *wrong) == ["fail"] * len(wrong)
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


async def test_a_check_that_hangs_does_not_hold_up_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    async def hang(_: Settings) -> AsyncIterator[Row]:
        yield Row("before", "ok", "")
        await asyncio.Event().wait()

    monkeypatch.setattr(service, "check_tokens", hang)
    found = await rows_of(Settings(redis_url=f"redis://127.0.0.1:{free_port()}"), 1.0)
    assert states(found, "before", "weak tokens", "operators") == ["ok", "fail", "warn"]


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


# -- the machine -----------------------------------------------------------------------------------------------


async def check(checked: Callable[[Settings], AsyncIterator[Row]], **settings: Any) -> Row:
    """Returns the only row of a check."""
    (row,) = [row async for row in checked(Settings(**settings))]
    assert bool(row.action) == (row.state != "ok"), row
    return row


async def test_a_folder_for_temporary_files_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)  # otherwise Python remembers the folder
    monkeypatch.setenv("TMPDIR", str(tmp_path / "missing"))
    row = await check(machine.check_temporary_files)
    assert (row.state, "TMPDIR" in row.detail, "missing" in row.detail) == ("fail", True, True)


@pytest.mark.parametrize(("hard", "state"), [(1_024, "warn"), (16_384, "ok"), (resource.RLIM_INFINITY, "ok")])
async def test_a_low_limit_of_open_files(hard: int, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1_024, hard))
    row = await check(machine.check_open_files)
    assert (row.state, "LimitNOFILE" in row.action) == (state, state == "warn")


async def test_secrets_that_others_can_read(monkeypatch: pytest.MonkeyPatch) -> None:
    with passable_folder() as folder:
        monkeypatch.chdir(folder)
        files = {name: folder / name for name in (".env", "provider-key", "client-secret", "smtp", "redis.pem")}
        for file in files.values():
            file.write_text("x")
            file.chmod(0o600)
        provider = ProviderSettings(url="https://a", region="x", key_file=str(files["provider-key"]), models={"m": "m"})
        settings: dict[str, Any] = {
            "redis_url": f"rediss://localhost:6379/0?ssl_keyfile={files['redis.pem']}",
            "providers_file": (provider,),
            "oidc_client_secret_file": str(files["client-secret"]),
            "smtp_url_file": str(files["smtp"]),
        }
        good = Row("secret files", "ok", "other users can read none")
        assert await check(machine.check_secret_files, **settings) == good
        for name, file in files.items():
            shown = name if name == ".env" else str(file)
            for mode, verb in ((0o644, "read"), (0o606, "change")):
                file.chmod(mode)
                row = await check(machine.check_secret_files, **settings)
                assert (row.state, row.detail) == ("warn", f"{shown}: every user of this machine can {verb} it")
            folder.chmod(0o700)  # nobody else comes to the file
            assert await check(machine.check_secret_files, **settings) == good
            folder.chmod(0o711)
            file.chmod(0o640)
        files["smtp"].unlink()
        row = await check(machine.check_secret_files, **settings)
        assert (row.state, row.detail) == ("fail", f"{files['smtp']}: No such file or directory")


# -- addresses and other servers -------------------------------------------------------------------------------


@pytest.mark.parametrize(("days", "trusted", "state"), [(1, True, "warn"), (9, False, "fail"), (-1, True, "fail")])
async def test_tls(days: int, trusted: bool, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context, authority = certificate(tmp_path, "receiver.example.com", days=days)
    connect = asyncio.open_connection
    monkeypatch.setattr(
        asyncio,
        "open_connection",
        lambda host, port, ssl: connect("127.0.0.1", port, ssl=ssl, server_hostname=host),
    )
    async with await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=context) as server:
        address = f"https://receiver.example.com:{server.sockets[0].getsockname()[1]}"
        row = await check(network.check_address, base_url=address, ca_file=authority if trusted else "")
    assert row.state == state, row
    assert ("1.0 days" in row.detail) == (state == "warn")


async def test_an_upstream_where_nothing_listens(tmp_path: Path) -> None:
    path = tmp_path / "gateway.sock"
    assert (await check(network.check_upstream, upstream=f"unix/{path}")).state == "warn"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        assert (await check(network.check_upstream, upstream=f"unix/{path}")).state == "ok"
    assert (await check(network.check_upstream, upstream=f"127.0.0.1:{free_port()}")).state == "warn"


async def test_an_identity_provider_with_another_issuer() -> None:
    async with FakeIdentityProvider() as provider:
        provider.metadata = {"issuer": "https://other.example"}
        assert (await check(network.check_sign_in, oidc_issuer=provider.address)).state == "fail"


async def test_a_mail_server_that_refuses_the_password_or_lacks_tls(tls: tuple[ssl.SSLContext, str]) -> None:
    async with MailServer(log_in=True) as server:
        wrong = f"smtp://ada:the-password@127.0.0.1:{server.port}"
        row = await check(network.check_mail_server, smtp_url=wrong)
        assert (row.state, row.detail) == ("fail", "takes no notices: SMTPAuthenticationError with 535")
        assert "the-password" not in repr(row)
    async with MailServer(tls[0], smtps=True) as server:
        assert (await check(network.check_mail_server, smtp_url=server.url, ca_file=tls[1])).state == "ok"
        assert (await check(network.check_mail_server, smtp_url=server.url)).state == "fail"


async def test_a_probe_check_that_voids_all_probes() -> None:
    async with FakeServer() as server:
        for allowed, status in ((False, 200), (True, 503)):  # its address is private
            server.reply = answer(status)
            settings = {"probe_check_url": server.address, "allow_private_addresses": allowed}
            assert (await check(network.check_probe_address, **settings)).state == "fail"


# -- Redis -----------------------------------------------------------------------------------------------------


async def redis_rows(settings: Settings) -> dict[str, Row]:
    return {row.check: row async for row in check_redis(settings)}


async def test_other_settings(redis_url: str, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    await store.client.config_set("maxmemory-policy", "allkeys-lru")
    await store.client.set(LAYOUT_KEY, "1000")

    async def behind(_: Store) -> float:
        return -3_600.0

    monkeypatch.setattr(Store, "read_skew", behind)
    try:
        found = await redis_rows(Settings(redis_url=redis_url))
    finally:
        await store.client.config_set("maxmemory-policy", "noeviction")
        await store.client.delete(LAYOUT_KEY)
    names = ("redis version", "redis persistence", "redis eviction", "redis memory", "clock", "layout")
    assert states(found, *names) == ["ok", "fail", "fail", "warn", "fail", "fail"]
    assert found["clock"].detail == "3600.0 seconds behind Redis's"


async def test_a_disk_that_redis_does_not_wait_for(tmp_path: Path) -> None:
    """Unless the access list hides the option."""
    with RedisServer("redis", "--maxmemory", "500mb", folder=tmp_path) as server, server.client() as client:
        for policy, state in (("always", "ok"), ("everysec", "ok"), ("no", "fail")):
            client.config_set("appendfsync", policy)
            row = (await redis_rows(Settings(redis_url=server.url)))["redis persistence"]
            assert (row.state, f"appendfsync {policy}" in row.detail) == (state, True), policy
        client.execute_command("ACL", "SETUSER", "default", "-config")
        row = (await redis_rows(Settings(redis_url=server.url)))["redis persistence"]
        assert row == Row("redis persistence", "ok", "the append-only file is on")


async def test_too_few_replicas(tmp_path: Path) -> None:
    with RedisServer("redis", folder=tmp_path) as server:
        found = await redis_rows(Settings(redis_url=server.url, redis_wait=1))
    detail = "fewer replicas of Redis confirm writes than GATEWAY_REDIS_WAIT requires"
    assert found["redis"] == Row("redis", "fail", detail, "start more replicas")
    assert found["redis persistence"].state == "ok", "what else could be wrong is named too"


# -- settings, secrets and workers -----------------------------------------------------------------------------


async def test_a_misspelt_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".env").write_text("GATEWAY_DAILY_CAP=free=0\n")
    monkeypatch.setenv("GATEWAY_APPS_SERVER", "x")
    doubtful = Settings(provider_url="http://a.example")
    told = [
        ("GATEWAY_APPS_SERVER is gone: Caddy serves the apps", "unset it"),
        ("GATEWAY_DAILY_CAP is unknown, and nothing reads it", "did you mean GATEWAY_DAILY_CAPS?"),
        ("provider default: prompts go there without TLS", "use https://, unless it is in your own network"),
    ]
    rows = [row async for row in service.check_settings(doubtful)]
    assert rows == [Row("settings", "warn", detail, action) for detail, action in told]


PUBLIC = "https://api.example.com"


@pytest.mark.parametrize(
    ("checked", "settings", "state"),
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
async def test_a_setting(
    checked: Callable[[Settings], AsyncIterator[Row]], settings: dict[str, Any], state: str
) -> None:
    """An operator can sign in, no private addresses are allowed beside a public one, and inference was not left off."""
    assert (await check(checked, **settings)).state == state


async def test_weak_tokens() -> None:
    strong, weak = "0a1b2c3d4e5f60718293", "correctcorrectcorrectcorrectcorrect"
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
        row = await check(service.check_encryption_key, redis_url=redis_url, encryption_key=key)
        assert (row.state, row.detail) == (state, detail)


async def test_workers_without_a_heartbeat(redis_url: str, store: Store) -> None:
    async def judge(engine: str) -> tuple[str, str]:
        row = await check(service.check_workers, redis_url=redis_url, deploy_engine=engine)
        return row.state, row.detail

    assert await judge("local") == ("warn", "none has a heartbeat: webhooks, deploys, monitors, sites")
    for group in ("webhooks", "monitors"):
        await store.client.set(worker_key(group, "host-1"), "token", ex=15)
        await store.client.sadd(WORKERS_KEY, f"{group}:host-1")
    await store.client.expire(WORKERS_KEY, 60)
    assert await judge("local") == ("warn", "none has a heartbeat: deploys, sites")
    assert await judge("external") == ("ok", "webhooks 1, monitors 1")


async def test_a_data_folder_that_would_stand_by(redis_url: str, store: Store, tmp_path: Path) -> None:
    async def judge(**settings: str) -> str:
        data = str(tmp_path / "data")
        return (await check(service.check_data_folder, redis_url=redis_url, data_dir=data, **settings)).state

    assert await judge() == "ok"
    assert not (tmp_path / "data").exists()
    releases = Releases(tmp_path / "data")
    releases.create_folders()
    await store.client.set(APPS_FOLDER_KEY, "of another host", ex=60)
    assert await judge() == "fail"  # the folder has no id yet
    await store.client.set(APPS_FOLDER_KEY, releases.folder_id(), ex=60)
    assert await judge() == "ok"
    await store.client.set(APPS_FOLDER_KEY, "of another host", ex=60)
    assert await judge() == "fail"
    assert await judge(storage_url="file:///shared") == "ok"
