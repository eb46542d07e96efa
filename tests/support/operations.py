"""The operations of the API that need a credential, from its OpenAPI document."""

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from gateway.api import openapi
from gateway.app import create_app
from gateway.settings import Settings

CREDENTIALS = {"apiKey", "operatorToken"}


def protected() -> Iterator[tuple[str, str, set[str]]]:
    """Yields method, path and accepted credentials of each operation that accepts an API key or operator token."""
    paths: dict[str, Any] = openapi.build(create_app(Settings()).litestar)["paths"]
    for path, item in paths.items():
        for method, operation in item.items():
            accepted = {kind for choice in operation.get("security", []) for kind in choice} & CREDENTIALS
            if accepted and path != "/mcp":  # JSON-RPC, which has only POST: see tests/gateway/mcp
                yield method.upper(), re.sub(r"{\w+}", "x", path), accepted


@cache
def list_operations() -> list[tuple[str, str, list[str]]]:
    """Returns them in order. A test calls it, and not its module, because it builds the whole app."""
    return sorted((method, path, sorted(accepted)) for method, path, accepted in protected())
