"""The operations of the API that need a credential, from its OpenAPI document."""

import re
from functools import cache
from typing import Any

from gateway.api import openapi
from gateway.app import create_app
from gateway.settings import Settings

CREDENTIALS = {"apiKey", "operatorToken"}


@cache
def list_operations() -> list[tuple[str, str, list[str]]]:
    """Returns method, path and accepted credentials of each operation that accepts an API key or operator token.

    A test calls it, and not its module, because it builds the whole app.
    """
    paths: dict[str, Any] = openapi.build(create_app(Settings()).litestar)["paths"]
    found = []
    for path, item in paths.items():
        for method, operation in item.items():
            accepted = {kind for choice in operation.get("security", []) for kind in choice} & CREDENTIALS
            if accepted and path != "/mcp":  # JSON-RPC, which has only POST: see tests/gateway/mcp
                found.append((method.upper(), re.sub(r"{\w+}", "x", path), sorted(accepted)))
    return sorted(found)
