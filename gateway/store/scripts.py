"""The Lua scripts."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

from redis.exceptions import NoScriptError

LUA = Path(__file__).parents[2] / "lua"


class Script:
    """One file of `lua/`, with what it uses of the others in front."""

    def __init__(self, name: str) -> None:
        own = (LUA / f"{name}.lua").read_text()
        used = re.findall(r"^-- uses (\w+)$", own, re.MULTILINE)
        self.source = "\n".join([*((LUA / f"{u}.lua").read_text() for u in used), own])
        self.sha = hashlib.sha1(self.source.encode(), usedforsecurity=False).hexdigest()

    async def __call__(self, client: Any, keys: list[str], *args: str | int) -> Any:
        try:
            return await client.evalsha(self.sha, len(keys), *keys, *args)
        except NoScriptError:
            return await client.eval(self.source, len(keys), *keys, *args)
