"""Decodes request bodies strictly, and describes bodies that are not JSON.

Litestar's own decoder accepts "1" for 1 and 0 for false.
"""

import re
from collections.abc import Generator
from types import UnionType
from typing import Any, ClassVar, TypeVar

import msgspec
from litestar import Request
from litestar.datastructures import State
from litestar.dto import AbstractDTO
from litestar.dto.data_structures import DTOFieldDefinition
from litestar.typing import FieldDefinition

from gateway.errors import RequestMalformed
from gateway.validation import explain, locate

SOURCE = {
    "application/gzip": {"schema": {"type": "string", "format": "binary"}},
    "application/zip": {"schema": {"type": "string", "format": "binary"}},
    "text/html": {"schema": {}},  # any text is a page
}

DIGITS = 18  # of a Content-Length; Python refuses to read thousands of them
NAME_CHARACTERS = 100  # of a field's name that an error repeats


T = TypeVar("T")


def declared_size(request: Request[Any, Any, State]) -> int | None:
    """Returns the request's Content-Length, or None."""
    declared = request.headers.get("content-length", "")
    if not re.fullmatch("[0-9]+", declared):
        return None
    return int(declared.lstrip("0")[:DIGITS] or 0)  # a longer number is too large as well, cut off or not


def decode_body(value: bytes, kind: type[T]) -> T:
    """Decodes the body for a route that reads it itself. Raises RequestMalformed."""
    return _decode(msgspec.json.Decoder(kind), value)


def decode_map(value: bytes, kind: type[T] | UnionType) -> dict[str, T]:
    """Decodes an object whose fields may have any names. Raises RequestMalformed, which names the field."""
    decoder: msgspec.json.Decoder[T] = msgspec.json.Decoder(kind)
    fields = decode_body(value, dict[str, msgspec.Raw])
    return {name: _decode(decoder, field, name[:NAME_CHARACTERS]) for name, field in fields.items()}


def _decode(decoder: msgspec.json.Decoder[T], value: bytes | msgspec.Raw, name: str = "body") -> T:
    try:
        return decoder.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        fault, field = locate(str(error))
        raise RequestMalformed(f"{field or name}: {explain(fault, decoder.type, field)}.") from None


class Body(AbstractDTO[Any]):
    """Plugs msgspec's strict decoder into Litestar, which requires the other methods of a DTO, too."""

    _decoders: ClassVar[dict[str, msgspec.json.Decoder[Any]]] = {}

    def decode_bytes(self, value: bytes) -> Any:
        """Decodes a body. Raises RequestMalformed, whose message names the field."""
        body = _decode(self._decoders[self.asgi_connection.route_handler.handler_id], value)
        self.asgi_connection.scope["state"]["body"] = body  # for the audit trail
        return body

    @classmethod
    def is_supported_model_type_field(cls, field_definition: FieldDefinition) -> bool:
        return field_definition.is_subclass_of(msgspec.Struct)

    @classmethod
    def create_for_field_definition(
        cls, field_definition: FieldDefinition, handler_id: str, *_: Any, **__: Any
    ) -> None:
        cls._decoders[handler_id] = msgspec.json.Decoder(field_definition.annotation)

    @classmethod
    def create_openapi_schema(cls, field_definition: FieldDefinition, handler_id: str, schema_creator: Any) -> Any:
        return schema_creator.for_field_definition(field_definition)

    @classmethod
    def generate_field_definitions(cls, model_type: type[Any]) -> Generator[DTOFieldDefinition, None, None]:
        yield from ()

    @classmethod
    def detect_nested_field(cls, field_definition: FieldDefinition) -> bool:
        return False
