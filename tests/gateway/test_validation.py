"""Messages about invalid values, in plain words."""

from typing import Annotated, Any, Literal

import msgspec
import pytest

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
        (Needed, "[]", "must be an object, not a list"),
        (Thing, '{"name": "a"}', "must have at least 2 characters"),
        (Thing, '{"name": "aaaa"}', "must have at most 3 characters"),
        (Thing, '{"name": "bbb"}', "must begin with a"),
        (Thing, '{"name": 1}', "must be text, not a whole number"),
        (Thing, '{"kind": "c"}', "must be one of a, b"),
        (Thing, '{"kind": "c\\n - at `$.name`"}', "must be one of a, b"),
        (list[Thing] | None, '[{}, {"kind": "c"}]', "must be one of a, b"),
        (First | Second, '{"type": "one", "things": {"x": [{"kind": "c"}]}}', "must be one of a, b"),
        (First | Second, '{"type": "c"}', "must be one of one, two"),
        (First | Second, '{"type": "two", "mode": 4}', "must be 3"),
        (Thing, '{"size": 0}', "must be at least 1"),
        (Thing, '{"size": 10}', "must be at most 9"),
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
