"""`capsule doctor`: checks this machine and its settings, before the first start and at any time.

Each check has a time limit, and none changes anything that stays. A check that another one has made pointless is left
out, such as those of Redis's settings while Redis does not answer.
"""

import asyncio
import os
import secrets
import shutil
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec

from gateway.accounts.vault import Vault
from gateway.errors import BackboneUnavailable, StorageUnavailable
from gateway.inference.provider.errors import ProviderSignal
from gateway.inference.provider.pool import Provider
from gateway.keys import LAYOUT_KEY
from gateway.operations.layout import LAYOUT
from gateway.operations.redis_health import MAX_SKEW_SECONDS, RedisHealth
from gateway.operations.sealed import SealedCounts, count_sealed
from gateway.redis.client import Store
from gateway.redis.errors import advise, describe
from gateway.settings import Settings
from gateway.settings.addresses import find_kubernetes_fault
from gateway.storage import open_storage
from workers.hosting import caddy
from workers.hosting.caddy import NoCaddy
from workers.sandbox import cgroups
from workers.sandbox.machine import Unsafe
from workers.sandbox.sandbox import APP_USERS, open_sandbox

CHECK_SECONDS = 15.0  # for one check
CONNECT_SECONDS = 5.0
OLDEST_REDIS = 7
WARN_SKEW_SECONDS = 2.0
WARN_FULL, FAIL_FULL = 0.8, 0.95  # of memory or of a disk
LEAST_FREE_BYTES = 1 << 30
LOCAL = ("localhost", "127.0.0.1", "::1")

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")  # of pods that use the API server
NO_KEY = "not set: the tokens of the apps' pods are made from it"

State = Literal["ok", "warn", "fail"]


class Row(msgspec.Struct, frozen=True):
    """The result of a check. `action` is empty if it is `ok`."""

    check: str
    state: State
    detail: str
    action: str = ""


async def examine(settings: Settings) -> list[Row]:
    """Runs all checks."""
    hosts_apps, in_cluster = settings.deploy_engine == "local", settings.apps_engine == "kubernetes"
    checks: list[tuple[str, Callable[[Settings], AsyncIterator[Row]]]] = [
        ("redis", check_redis),
        ("storage", check_storage),
        *([("sandbox", check_sandbox)] if hosts_apps and not (in_cluster and _has_service_account()) else []),
        *([("caddy", check_caddy)] if hosts_apps and not in_cluster else []),
        *([("cluster", check_cluster)] if in_cluster else []),
        ("encryption key", check_encryption_key),
        ("address", check_address),
        *([("apps' domain", check_apps_domain)] if hosts_apps else []),
        ("provider", check_provider),
    ]
    found = await asyncio.gather(*(_collect(name, check(settings)) for name, check in checks))
    return [row for rows in found for row in rows]


def _has_service_account() -> bool:
    """Returns whether this is a pod of the gateway or the worker `sites`, which leave confining apps to the cluster."""
    return SERVICE_ACCOUNT.exists()


async def _collect(name: str, check: AsyncIterator[Row]) -> list[Row]:
    rows = []
    try:
        async with asyncio.timeout(CHECK_SECONDS):
            async for row in check:
                rows.append(row)  # noqa: PERF401 - those before a timeout count
    except TimeoutError:
        rows.append(Row(name, "fail", f"no answer within {CHECK_SECONDS:.0f} seconds", "check the network"))
    except OSError as error:
        rows.append(Row(name, "fail", str(error), "correct this, and run the command again"))
    return rows


# -- Redis ---------------------------------------------------------------------------------------------------


async def check_redis(settings: Settings) -> AsyncIterator[Row]:
    store = Store(settings.redis_url, ca_file=settings.ca_file, replicas=settings.redis_wait)
    try:
        try:
            servers = await store.info()
            await RedisHealth(store).check()
        except BackboneUnavailable as error:
            yield Row("redis", "fail", describe(error.__cause__ or error), advise(error.__cause__ or error))
            return
        for info in servers:
            for row in _judge_server(info):
                yield row
        yield _judge_skew(await store.read_skew())
        yield _judge_layout(await store.get(LAYOUT_KEY) or str(LAYOUT))
    finally:
        await store.close()


def _judge_server(info: dict[str, Any]) -> Iterator[Row]:
    version = str(info.get("valkey_version") or info.get("redis_version", ""))
    name = "Valkey" if "valkey_version" in info else "Redis"
    if int(version.partition(".")[0] or 0) >= OLDEST_REDIS:
        yield Row("redis version", "ok", f"{name} {version}")
    else:
        yield Row("redis version", "fail", f"{name} {version}", "use Redis 7, Valkey 8, or newer")
    if info.get("aof_enabled"):
        yield Row("redis persistence", "ok", "the append-only file is on")
    else:
        action = "set appendonly yes; otherwise a restart loses accounts and money"
        yield Row("redis persistence", "fail", "the append-only file is off", action)
    policy = str(info.get("maxmemory_policy", ""))
    if policy == "noeviction":
        yield Row("redis eviction", "ok", policy)
    else:
        yield Row("redis eviction", "fail", policy, "set maxmemory-policy noeviction; eviction loses apps or money")
    used, limit = int(info.get("used_memory", 0)), int(info.get("maxmemory", 0))
    if not limit:
        yield Row("redis memory", "warn", "no limit", "set maxmemory below the memory of its machine")
    else:
        yield Row("redis memory", *_judge_use(used, limit, "raise maxmemory of Redis"))


def _judge_use(used: int, limit: int, action: str) -> tuple[State, str, str]:
    share = used / limit
    state: State = "fail" if share > FAIL_FULL else "warn" if share > WARN_FULL else "ok"
    return state, f"{share:.0%} of {limit / (1 << 30):.1f} GiB are used", "" if state == "ok" else action


def _judge_skew(skew: float) -> Row:
    detail = f"{abs(skew):.1f} seconds {'ahead of' if skew > 0 else 'behind'} Redis's"
    if abs(skew) > WARN_SKEW_SECONDS:
        state: State = "fail" if abs(skew) > MAX_SKEW_SECONDS else "warn"
        return Row("clock", state, detail, "synchronize the clocks of both machines, for example with chrony")
    return Row("clock", "ok", detail)


def _judge_layout(text: str) -> Row:
    if text.isdecimal() and int(text) <= LAYOUT:
        return Row("layout", "ok", f"the data are of layout {text}, and this version knows {LAYOUT}")
    action = "run the restore again that was interrupted, or the newer version that wrote the data"
    return Row("layout", "fail", f"the data are of layout {text!r}, and this version knows {LAYOUT}", action)


# -- the machine ---------------------------------------------------------------------------------------------


async def check_storage(settings: Settings) -> AsyncIterator[Row]:
    storage, probe = open_storage(settings), f"doctor-{secrets.token_hex(4)}"
    action = "see the line above" if settings.storage_url else "make this user the owner of GATEWAY_DATA_DIR"
    try:
        await storage.put(probe, b"")
        await storage.delete([probe])
        yield Row("storage", "ok", "can be written")
    except StorageUnavailable as error:
        cause = error.__cause__
        detail = f"cannot be written: {(isinstance(cause, OSError) and cause.strerror) or type(cause).__name__}"
        yield Row("storage", "fail", detail, action)
    space = await asyncio.to_thread(shutil.disk_usage, _find_folder(settings))
    if not space.total:
        action = "watch its space yourself, or move GATEWAY_DATA_DIR to a disk of this machine"
        yield Row("disk", "warn", "the file system does not say how large it is", action)
        return
    state, detail, _ = _judge_use(space.total - space.free, space.total, "")
    if state == "ok" and space.free < LEAST_FREE_BYTES:
        state = "warn"
    yield Row("disk", state, detail, "" if state == "ok" else "free space, or move GATEWAY_DATA_DIR to a larger disk")


def _find_folder(settings: Settings) -> Path:
    """Returns the data folder, or before the first start the nearest folder above it."""
    folder = Path(settings.data_dir).absolute()
    return next(path for path in (folder, *folder.parents) if path.is_dir())


def _try_sandbox(settings: Settings) -> None:
    """Raises Unsafe."""
    with TemporaryDirectory(dir=_find_folder(settings)) as folder:  # which the check may fill with copies of tools
        Path(folder).chmod(0o755)  # builds run as other users
        open_sandbox(settings, APP_USERS).check(Path(folder))


async def check_sandbox(settings: Settings) -> AsyncIterator[Row]:
    if settings.trust_builds:
        yield Row("sandbox", "warn", "GATEWAY_TRUST_BUILDS: code runs without one", "use this for development only")
        return
    try:
        await asyncio.to_thread(_try_sandbox, settings)
    except Unsafe as error:
        yield Row("sandbox", "fail", error.reason, error.remedy)
    else:
        yield Row("sandbox", "ok", f"confines code, for user {os.geteuid()}")
    if await asyncio.to_thread(cgroups.find_parents):
        yield Row("control groups", "ok", "memory, processes and CPU are bounded")
    else:
        state: State = "warn" if settings.allow_private_addresses else "fail"
        action = "delegate a control group with memory, pids and cpu to the worker, or run it as root"
        yield Row("control groups", state, "this process has none", action)


async def check_caddy(settings: Settings) -> AsyncIterator[Row]:
    try:
        yield Row("caddy", "ok", caddy.find_binary())
    except NoCaddy as error:
        yield Row("caddy", "fail", "not found", str(error))
    if caddy.read_process(Path(settings.data_dir)) is not None:
        yield Row("port", "ok", f"Caddy serves the apps at {settings.apps_listen}")
        return
    host, _, port = settings.apps_listen.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host.strip("[]"), int(port)))
        except OSError as error:
            reason = f"{settings.apps_listen}: {error.strerror}"
            yield Row("port", "fail", reason, "stop what listens there, or change GATEWAY_APPS_LISTEN")
        else:
            yield Row("port", "ok", f"{settings.apps_listen} is free")


async def check_cluster(settings: Settings) -> AsyncIterator[Row]:
    """Asks the API server whether this process has every right that the worker `sites` uses.

    The pod of that worker has them. A builder knows no cluster, and needs none.
    """
    if fault := find_kubernetes_fault():
        yield Row("cluster", "fail", fault, "install it where the worker `sites` runs")
        return
    from workers.kubernetes.cluster import (
        Cluster,
        NoCluster,
    )  # imported here, because only this engine needs its client

    try:
        cluster = Cluster(settings.kubernetes_namespace)
    except NoCluster:
        action = "run it where they do: kubectl -n capsule exec deploy/sites -- capsule doctor"
        yield Row("cluster", "warn", "the rights of the worker sites are checked where it runs", action)
        return
    try:
        async with cluster:
            missing = await cluster.find_missing_rights()
    except NoCluster as error:
        yield Row("cluster", "fail", str(error), "check KUBECONFIG, or the pod's service account, and the network")
        return
    where = f"in the namespace {cluster.namespace}"
    if missing:
        action = "apply the roles of ops/kubernetes/apps; see docs/kubernetes.md"
        yield Row("cluster", "fail", f"the worker sites lacks rights {where}: {', '.join(missing)}", action)
    else:
        yield Row("cluster", "ok", f"the worker sites has all rights that it needs {where}")


async def check_encryption_key(settings: Settings) -> AsyncIterator[Row]:
    action = "set GATEWAY_ENCRYPTION_KEY to a long random text, and keep a copy elsewhere"
    counts, store = SealedCounts({}, {}), Store(settings.redis_url, ca_file=settings.ca_file)
    with suppress(BackboneUnavailable):  # the rows of Redis say so
        counts = await count_sealed(store, Vault(settings.encryption_key))
    await store.close()
    if counts.unopened:
        detail = f"opens {sum(counts.keys.values())} of {counts.total} stored secrets"
        remedy = "add the key of the others to GATEWAY_ENCRYPTION_KEY; capsule secrets check names them"
        yield Row("encryption key", "fail", detail, remedy)
    elif settings.encryption_key:
        yield Row("encryption key", "ok", f"opens all of {counts.total} stored secrets")
    elif settings.apps_engine == "kubernetes":
        yield Row("encryption key", "fail", NO_KEY, action)
    else:
        yield Row("encryption key", "warn", "not set: webhooks and variables are refused", action)


# -- the network ---------------------------------------------------------------------------------------------


async def check_address(settings: Settings) -> AsyncIterator[Row]:
    url = urlsplit(settings.base_url)
    host = url.hostname or ""
    if host in LOCAL:
        yield Row("tls", "warn", f"{settings.base_url} is of this machine only", "set GATEWAY_BASE_URL for other users")
        return
    if url.scheme != "https":
        yield Row("tls", "fail", f"{settings.base_url} has no TLS", "use https:// in GATEWAY_BASE_URL")
        return
    context = ssl.create_default_context()
    if settings.ca_file:
        context.load_verify_locations(settings.ca_file)
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            _, writer = await asyncio.open_connection(host, url.port or 443, ssl=context)
        writer.close()
    except ssl.SSLCertVerificationError as error:
        yield Row("tls", "fail", f"{host}: {error.verify_message}", "give the proxy a certificate for this name")
    except (OSError, TimeoutError) as error:
        detail = f"{host} does not answer: {str(error) or type(error).__name__}"
        yield Row(
            "tls", "warn", detail, "before the first start, this is normal; otherwise check the proxy and the DNS"
        )
    else:
        yield Row("tls", "ok", f"{host} has a valid certificate")


async def check_apps_domain(settings: Settings) -> AsyncIterator[Row]:
    domain = settings.apps_domain.partition(":")[0]
    if domain.endswith("localhost"):
        yield Row("dns", "warn", f"{domain} is of this machine only", "set GATEWAY_APPS_DOMAIN for other users")
        return
    name = f"doctor-{secrets.token_hex(4)}.{domain}"
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            found = await asyncio.get_running_loop().getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, TimeoutError):
        action = f"add an A or AAAA record for *.{domain} that leads to the hosts of the apps"
        yield Row("dns", "fail", f"names below {domain} have no address", action)
    else:
        yield Row("dns", "ok", f"*.{domain} is at {', '.join(sorted({str(each[4][0]) for each in found}))}")


PROVIDER_ROWS: dict[ProviderSignal | None, tuple[State, str, str]] = {
    ProviderSignal.REACHED: ("ok", "answers, and takes the key", ""),
    ProviderSignal.REFUSED: ("fail", "refuses the key", "correct the key"),
    ProviderSignal.QUOTA: ("fail", "its quota is used up", "raise the quota at the provider"),
    ProviderSignal.FAILED: ("fail", "does not answer", "check its address, the network and GATEWAY_CA_FILE"),
    None: ("fail", "this machine cannot connect", "free descriptors or local ports"),
}


async def check_provider(settings: Settings) -> AsyncIterator[Row]:
    """Checks the provider, or each of those that a file names."""
    for chosen in settings.providers:
        check = f"provider {chosen.name}" if settings.providers_file else "provider"
        provider = Provider(settings, chosen)
        try:
            if provider.is_configured():
                yield Row(check, *PROVIDER_ROWS[await provider.probe()])
            else:
                yield Row(check, "warn", "there is no key", "give it one; without any key, inference is off")
        finally:
            provider.close()
