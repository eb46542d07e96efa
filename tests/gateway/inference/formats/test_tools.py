"""The calls of a whole answer, joined from their parts."""

import msgspec

from gateway.inference.formats.tools import join_calls
from gateway.inference.provider.chunks import CallPart, FunctionPart


def part(
    index: int | None = None, id: str | None = None, name: str | None = None, arguments: str | None = None
) -> CallPart:
    return CallPart(index, id, "function", FunctionPart(name, arguments))


def joined(*parts: CallPart) -> list[tuple[str, str, str]]:
    return [(call.id, call.function.name, call.function.arguments) for call in join_calls([*parts])]


def test_parts_are_joined_by_their_index() -> None:
    assert joined(
        part(0, "a", "first", ""),
        part(1, "b", "second", '{"x":'),
        part(0, None, None, '{"y"'),
        part(1, arguments="1}"),
        part(0, arguments=":2}"),
        CallPart(0),
    ) == [("a", "first", '{"y":2}'), ("b", "second", '{"x":1}')]


def test_a_name_that_is_repeated_counts_once() -> None:
    assert joined(part(0, "a", "f", "{"), part(0, "a", "f", "}")) == [("a", "f", "{}")]


def test_parts_without_an_index_follow_their_id() -> None:
    """Some providers send complete calls without an index."""
    assert joined(part(None, "a", "f", "{}"), part(None, "b", "g", "["), part(arguments="]")) == [
        ("a", "f", "{}"),
        ("b", "g", "[]"),
    ]
    assert joined(part(arguments="{}")) == [("", "", "{}")]


def test_a_part_is_relayed_without_absent_fields() -> None:
    assert msgspec.json.encode(part(0, arguments="{")) == b'{"index":0,"type":"function","function":{"arguments":"{"}}'
