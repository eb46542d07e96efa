"""Describes one operation of the API in OpenAPI 3.1: its request body, its response and its errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from gateway import errors
from gateway.inference.spend.prices import MODEL_CHOICE

Schema = dict[str, Any]
Errors = Sequence[type[errors.ServiceError]]
JSON = "application/json"

# Example messages of the errors whose message depends on the request.
MESSAGES: dict[type[errors.ServiceError], str] = {
    errors.RequestMalformed: "name: must be text, not a whole number.",
    errors.ModelNotAllowed: MODEL_CHOICE,
}


class ErrorDetail(msgspec.Struct):
    code: str
    message: str  # says what to do next
    requestId: str


class Error(msgspec.Struct):
    error: ErrorDetail


def schemas(types: Sequence[Any]) -> tuple[tuple[Schema, ...], Schema]:
    """Returns a schema for each type, and the components to which they refer."""
    return msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")


def describe_response(body: Any, media_type: str = JSON) -> Schema:
    """Describes a response with status 2xx. `body` is the type of its JSON, or None."""
    if media_type != JSON:
        schema = {"type": "object"} if media_type == "text/event-stream" else {"type": "string"}
        return {"description": "Done", "content": {media_type: {"schema": schema}}}
    if body is None:
        return {"description": "Done"}
    (schema,), _ = schemas([body])
    return {"description": "Done", "content": {JSON: {"schema": schema}}}


def describe_errors(errors: Errors, path: str) -> Schema:
    """Returns the description of the error responses by status."""
    responses: Schema = {}
    for status in sorted({error.status for error in errors}):
        responses[str(status)] = _describe_status([error for error in errors if error.status == status])
    if "{" in path and "404" not in responses:
        responses["404"] = {
            "description": "No such address",
            "content": {"text/plain": {"example": "Not Found"}},
        }
    return responses


def _describe_status(errors: Errors) -> Schema:
    examples = {
        error.code: {
            "value": {
                "error": {
                    "code": error.code,
                    "message": MESSAGES.get(error, error.message),
                    "requestId": "2b8a6f…",
                }
            }
        }
        for error in errors
    }
    response: Schema = {"description": " or ".join(f"`{code}`" for code in examples)}
    if errors[0].status in (429, 503):
        response["headers"] = {"Retry-After": {"description": "Seconds", "schema": {"type": "integer"}}}
    content = {"schema": {"$ref": "#/components/schemas/Error"}, "examples": examples}
    return {**response, "content": {JSON: content}}


def describe_body(content: Schema, *, required: bool = True) -> Schema:
    """Describes a request body. `content` maps media types to a schema and an example."""
    return {"required": required, "content": content}


def json_body(body: Any, example: Any = None) -> Schema:
    """Describes a request body of JSON. `body` is its type."""
    (schema,), _ = schemas([body])
    return describe_body({JSON: {"schema": schema} if example is None else {"schema": schema, "example": example}})
