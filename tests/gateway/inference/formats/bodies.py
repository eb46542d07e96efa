"""Bodies as a format reads them, without a gateway: what the provider gets, what is priced, and what is refused."""

import json
from types import ModuleType
from typing import Any

from gateway.errors import ServiceError
from tests.gateway.inference.formats.chat import json_bytes


def read_payload(format: ModuleType, body: bytes | dict[str, Any]) -> tuple[dict[str, Any], int]:
    """Returns the provider's request, and the bytes that are priced."""
    request = format.read_completion_request(body if isinstance(body, bytes) else json.dumps(body).encode(), False)
    payload = json.loads(request.payload)
    assert (payload["model"], payload["max_tokens"]) == (request.model, request.max_tokens)
    return payload, request.text_bytes


def price(texts: str, *values: Any, messages: int = 1) -> int:
    """Returns the priced bytes of texts, of values as JSON, and of the allowance for further messages."""
    return len(texts.encode()) + sum(map(json_bytes, values)) + 16 * (messages - 1)


def refusal_of(format: ModuleType, body: bytes | dict[str, Any]) -> ServiceError | None:
    """Returns why the format refuses the body."""
    try:
        read_payload(format, body)
    except ServiceError as error:
        return error
    return None
