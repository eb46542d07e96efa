"""Each field of a request's body has a limit: a value at the limit passes, and one beyond it is refused."""

import json
import time
from collections.abc import Iterator
from typing import Annotated, Any, get_origin

import msgspec
import pytest
from msgspec import inspect as types

from gateway import validation
from gateway.accounts.jose.jwt import validate_claims
from gateway.api.bodies import Body
from gateway.api.deploys import Rollback
from gateway.app import create_app
from gateway.errors import TokenInvalid
from gateway.settings import Settings

FINITE = (types.BoolType, types.NoneType, types.LiteralType, types.EnumType)


def unbounded(kind: types.Type, path: str) -> Iterator[str]:
    """Yields the fields of a type without a limit on their length or size."""
    if isinstance(kind, types.StructType):
        for field in kind.fields:
            yield from unbounded(field.type, f"{path}.{field.encode_name}")
    elif isinstance(kind, types.UnionType):
        for each in kind.types:
            yield from unbounded(each, path)
    elif isinstance(kind, types.Metadata):
        yield from unbounded(kind.type, path)
    elif isinstance(kind, types.StrType):
        yield from () if kind.max_length is not None else (path,)
    elif isinstance(kind, types.ListType):
        yield from () if kind.max_length is not None else (path,)
        yield from unbounded(kind.item_type, f"{path}[]")
    elif isinstance(kind, types.IntType):
        yield from () if None not in (kind.ge, kind.le) else (path,)
    elif not isinstance(kind, FINITE):
        yield f"{path}: {type(kind).__name__}"


def bodies() -> list[Any]:
    """Returns the body type of each route with a body."""
    create_app(Settings())
    return [*(decoder.type for decoder in Body._decoders.values()), Rollback]


def test_each_field_of_each_body_has_a_limit() -> None:
    kinds = bodies()
    assert len(kinds) > 12
    assert [field for kind in kinds for field in unbounded(types.type_info(kind), kind.__name__)] == []


def limit_values(kind: Any) -> tuple[Any, Any]:
    """Returns a value at the limit, and one beyond it."""
    (meta,) = kind.__metadata__
    if meta.le is not None:
        return meta.le, meta.le + 1
    if get_origin(kind.__origin__) is list:
        return ["a"] * meta.max_length, ["a"] * (meta.max_length + 1)
    return "é" * meta.max_length, "é" * (meta.max_length + 1)


@pytest.mark.parametrize("name", [name for name, kind in vars(validation).items() if get_origin(kind) is Annotated])
def test_values_at_the_limit_and_beyond(name: str) -> None:
    kind = getattr(validation, name)
    most, more = limit_values(kind)
    assert msgspec.json.decode(json.dumps(most), type=kind) == most
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(json.dumps(more), type=kind)


def test_audiences_are_compared_as_sets() -> None:
    claims = {"exp": time.time() + 60, "aud": [f"claimed{n}" for n in range(1_440)]}
    began = time.process_time()
    with pytest.raises(TokenInvalid):
        validate_claims(claims, None, [f"wanted{n}" for n in range(100_000)])
    assert time.process_time() - began < 0.5
    validate_claims(claims, None, ["other", "claimed7"])
    validate_claims(claims, None, "claimed7")
