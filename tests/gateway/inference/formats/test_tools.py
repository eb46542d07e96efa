"""The calls of a whole answer, joined from their parts."""

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
