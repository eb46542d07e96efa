"""Runs all checks side by side.

Each check has a time limit, and none changes anything that stays. A check that another one has made pointless is left
out, such as those of Redis's settings while Redis does not answer.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

from gateway.loops import ignore_late_lookups
from gateway.settings import Settings
from workers.doctor import machine, network, redis, service
from workers.doctor.row import CORRECT, Row

CHECK_SECONDS = 12.0  # for one check: the command takes less than 20, with its start

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")  # of pods that use the API server


async def examine(settings: Settings, seconds: float = CHECK_SECONDS) -> list[Row]:
    """Runs all checks at once, each for so many seconds at most."""
    ignore_late_lookups()
    hosts_apps, in_cluster = settings.deploy_engine == "local", settings.apps_engine == "kubernetes"
    checks: list[tuple[str, Callable[[Settings], AsyncIterator[Row]]]] = [
        ("settings", service.check_settings),
        ("redis", redis.check_redis),
        ("storage", machine.check_storage),
        ("temporary files", machine.check_temporary_files),
        ("open files", machine.check_open_files),
        ("secret files", machine.check_secret_files),
        *([("sandbox", machine.check_sandbox)] if hosts_apps and not (in_cluster and _has_service_account()) else []),
        *([("caddy", machine.check_caddy)] if hosts_apps and not in_cluster else []),
        *([("cluster", network.check_cluster)] if in_cluster else []),
        ("encryption key", service.check_encryption_key),
        ("operators", service.check_operators),
        ("weak tokens", service.check_tokens),
        ("emergency file", service.check_emergency_file),
        ("workers", service.check_workers),
        *([("data folder", service.check_data_folder)] if hosts_apps and not in_cluster else []),
        ("private addresses", service.check_private_addresses),
        ("tls", network.check_address),
        *([("dns", network.check_apps_domain)] if hosts_apps else []),
        *([("upstream", network.check_upstream)] if settings.upstream else []),
        *((name, partial(network.check_provider, name, each)) for name, each in network.name_providers(settings)),
        *([("sign-in", network.check_sign_in)] if settings.oidc_issuer else []),
        *([("mail server", network.check_mail_server)] if settings.sends_notices else []),
        *([("probe check", network.check_probe_address)] if settings.probe_check_url else []),
    ]
    found = await asyncio.gather(*(_collect(name, check(settings), seconds) for name, check in checks))
    return [row for rows in found for row in rows]


def _has_service_account() -> bool:
    """Returns whether this is a pod of the gateway or the worker `sites`, which leave confining apps to the cluster."""
    return SERVICE_ACCOUNT.exists()


async def _collect(name: str, check: AsyncIterator[Row], seconds: float) -> list[Row]:
    rows = []
    try:
        async with asyncio.timeout(seconds):
            async for row in check:
                rows.append(row)  # noqa: PERF401 - those before a timeout count
    except TimeoutError:
        rows.append(Row(name, "fail", f"no answer within {seconds:.0f} seconds", "check the network"))
    except OSError as error:
        rows.append(Row(name, "fail", str(error), CORRECT))
    return rows
