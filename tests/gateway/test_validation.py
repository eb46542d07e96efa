"""Messages about invalid values, in plain words, and the limit that each field of a request's body has."""

import json
import time
from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_origin

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
from gateway.validation import declare_pattern, explain, locate

BEGINNING = declare_pattern("^a", "must begin with a")


class Thing(msgspec.Struct, forbid_unknown_fields=True):
    name: Annotated[str, msgspec.Meta(min_length=2, max_length=3, pattern=BEGINNING)] = "ab"
    kind: Literal["a", "b"] = "a"
    size: Annotated[int, msgspec.Meta(ge=1, lt=10)] = 1
    tags: Annotated[list[str], msgspec.Meta(max_length=1)] = []
    maybe: bool | None = None


class First(msgspec.Struct, tag="one"):
    things: dict[str, list[Thing]] = {}


class Second(msgspec.Struct, tag="two"):
    mode: Literal[3] | None = None


class Needed(msgspec.Struct):
    name: Annotated[str, msgspec.Meta(min_length=1)]


@pytest.mark.parametrize(
    ("kind", "body", "words"),
    [
        (Needed, '{"name": ""}', "must not be empty"),
        (Needed, "{}", "the field name is missing"),
        (Thing, '{"name": "a"}', "must have at least 2 characters"),
        (Thing, '{"name": "bbb"}', "must begin with a"),
        (Thing, '{"name": 1}', "must be text, not a whole number"),
        (Thing, '{"kind": "c"}', "must be one of a, b"),
        (Thing, '{"kind": "c\\n - at `$.name`"}', "must be one of a, b"),
        (First | Second, '{"type": "one", "things": {"x": [{"kind": "c"}]}}', "must be one of a, b"),
        (First | Second, '{"type": "c"}', "must be one of one, two"),
        (First | Second, '{"type": "two", "mode": 4}', "must be 3"),
        (Thing, '{"size": 0}', "must be at least 1"),
        (Thing, '{"tags": ["a", "b"]}', "must have at most 1 entry"),
        (Thing, '{"maybe": "yes"}', "must be true or false or null, not text"),
        (Thing, '{"other": 1}', "there is no field called other"),
        (Thing, "{", "is not valid JSON: it is truncated"),
    ],
)
def test_errors_in_plain_words(kind: Any, body: str, words: str) -> None:
    with pytest.raises(msgspec.DecodeError) as caught:
        msgspec.json.decode(body, type=kind)
    fault, path = locate(str(caught.value))
    assert explain(fault, kind, path) == words
    assert explain("Something new", None) == "something new"


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
