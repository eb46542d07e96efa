"""The addresses at which an app's page asks a model, each with its format."""

from collections.abc import Callable
from typing import NamedTuple

from gateway.inference.formats import native, openai, responses
from gateway.inference.formats.completion import CompletionRequest


class Endpoint(NamedTuple):
    format: str  # its name in the request log, metrics and traces
    # Decodes the body, or raises its fault. Gets the body, and whether the `Accept` header asks for a stream.
    read_completion_request: Callable[[bytes, bool], CompletionRequest]


ENDPOINTS = {
    "ai": Endpoint("native", native.read_completion_request),
    "ai/chat/completions": Endpoint("openai", openai.read_completion_request),
    "ai/responses": Endpoint("responses", responses.read_completion_request),
}
FORMATS = [endpoint.format for endpoint in ENDPOINTS.values()]
