"""`capsule worker --check`: checks that the workers of this host are running.

The check reads the heartbeat of each worker except `sites`. `sites` serves apps even while Redis is unavailable, so the
check connects to Caddy.
"""

import asyncio
import socket
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from gateway.errors import BackboneUnavailable
from gateway.keys import worker_key
from gateway.redis.client import Store
from gateway.settings import Settings
from workers.heartbeat import worker_name

NUMBERS_CHECKED = 10  # a restarted worker uses the next number until its old heartbeat has expired
CHECK_SECONDS = 4.0  # less than the timeout of a container's health check


def combine_names(settings: Settings, names: Sequence[str]) -> list[str]:
    """Adds `sites` to `deploys` without shared storage: then the releases are only in this host's data folder.

    With an external engine, there are none.
    """
    if "deploys" not in names or settings.storage_url:
        return list(names)
    others = [name for name in names if name != "sites"]
    return [*others, "sites"] if settings.deploy_engine == "local" else others


async def find_fault(settings: Settings, names: Sequence[str]) -> str:
    """Describes the first of these workers that is not running on this host; '' if all are running."""
    store = Store(settings.redis_url, ca_file=settings.ca_file)
    try:
        async with asyncio.timeout(CHECK_SECONDS):
            for name in names:
                if fault := await _find_worker_fault(settings, store, name):
                    return fault
    except (BackboneUnavailable, TimeoutError) as error:
        cause = error.__cause__ or error
        return f"Redis cannot be read: {str(cause) or type(cause).__name__}"
    finally:
        await store.close()
    return ""


async def _find_worker_fault(settings: Settings, store: Store, name: str) -> str:
    if name == "sites" and settings.apps_engine == "local":
        return await _find_sites_fault(Path(settings.data_dir))
    if name == "deploys" and settings.deploy_engine == "external":
        return ""  # an external engine builds, and this worker waits without a heartbeat
    candidates = [worker_key(name, worker_name(number)) for number in range(1, NUMBERS_CHECKED + 1)]
    if any(await store.get_all(candidates)):
        return ""
    return f"no {name} worker on {socket.gethostname()} has a heartbeat"


async def _find_sites_fault(folder: Path) -> str:
    from workers.hosting import caddy  # imported here, because it loads most of the workers' code

    address = urlsplit(caddy.read_address(folder))
    if not address.port:
        return f"no sites worker has served {folder} yet"
    try:
        async with asyncio.timeout(CHECK_SECONDS / 2):
            _, writer = await asyncio.open_connection(address.hostname, address.port)
    except OSError:
        return f"the Caddy of {folder} does not answer at {address.netloc}"
    writer.close()
    return ""
