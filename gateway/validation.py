"""Translates msgspec's validation errors into plain words. Of a value, only an invalid choice is repeated."""

import re
from collections.abc import Callable

_NAMES = {
    "str": "text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}
_UNITS = {"str": "character", "array": "entry", "object": "field"}
_BOUNDS = {">=": "at least", "<=": "at most", ">": "more than", "<": "less than"}


def explain(fault: str) -> str:
    """Returns the predicate of a sentence, such as `must not be empty`."""
    for pattern, words in _RULES:
        if found := pattern.fullmatch(fault):
            return words(found)
    return fault[:1].lower() + fault[1:]


def _length(found: re.Match[str]) -> str:
    kind, bound, number = found.groups()
    if (bound, number) == (">=", "1"):
        return "must not be empty"
    unit = _UNITS[kind]
    many = unit if number == "1" else unit.replace("entry", "entrie") + "s"
    return f"must have {_BOUNDS[bound]} {number} {many}"


def _type(found: re.Match[str]) -> str:
    expected, got = found.groups()
    names = [_NAMES.get(name, name) for name in expected.split(" | ")]
    return f"must be {' or '.join(names)}, not {_NAMES.get(got, got)}"


_RULES: list[tuple[re.Pattern[str], Callable[[re.Match[str]], str]]] = [
    (re.compile(r"Expected `(str|array|object)` of length (>=|<=) (\d+)"), _length),
    (re.compile(r"Expected `(?:int|float)` (>=|<=|>|<) (\S+)"), lambda m: f"must be {_BOUNDS[m[1]]} {m[2]}"),
    (re.compile(r"Expected `([\w| ]+)`, got `(\w+)`"), _type),
    (re.compile(r"Expected `str` matching regex .*", re.DOTALL), lambda _: "does not have the required format"),
    (re.compile(r"Object missing required field `(.*)`"), lambda m: f"the field {m[1]} is missing"),
    (re.compile(r"Object contains unknown field `(.*)`"), lambda m: f"there is no field called {m[1]}"),
    (re.compile(r"Invalid (?:enum )?value (.*)", re.DOTALL), lambda m: f"{m[1]} is not one of the choices"),
    (re.compile(r"JSON is malformed: (.*)"), lambda m: f"is not valid JSON: {m[1]}"),
    (re.compile(r"Input data was truncated"), lambda _: "is not valid JSON: it is truncated"),
    (re.compile(r"'utf-8' codec .*|Invalid UTF-8 .*"), lambda _: "is not UTF-8 text"),
]
