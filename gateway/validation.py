"""Limits the length and size of values from clients, and explains in plain words which one is invalid.

Each field of a request's body has one of the types below. The body as a whole is also limited, but a field of a
megabyte would be read, compared and listed again and again. A message never repeats a value.
"""

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from gateway.errors import RequestMalformed
from gateway.ids import A_TIME, TimeSpan, read_time

# Ends a pattern in JSON Schema and in Python, where `$` alone may also be before a line break at the end.
END = r"$(?!\n)"

_PATTERNS: dict[str, str] = {}  # the words for a text that does not match, by the expression as a fault quotes it


def declare_pattern(expression: str, words: str) -> str:
    """Returns the regular expression. `explain` says these words of a text that does not match it."""
    _PATTERNS[repr(expression)] = words
    return expression


ONE_LINE = declare_pattern(r"^[^\x00-\x1f\x7f]*" + END, "must be one line, without control characters")

Url = Annotated[str, Meta(max_length=2_048)]
Host = Annotated[str, Meta(max_length=254)]  # including a final dot
Id = Annotated[str, Meta(max_length=128)]  # of an account, an app, a deploy, a key …
Credential = Annotated[str, Meta(max_length=256)]  # an API key, an operator's token
Claim = Annotated[str, Meta(max_length=200)]  # the path of a claim or of a field
Issuer = Annotated[str, Meta(max_length=1_024)]
Audience = Annotated[str, Meta(max_length=200)]
Audiences = Annotated[list[Audience], Meta(max_length=20)]
SigningSecret = Annotated[str, Meta(max_length=1_024)]
Sealed = Annotated[str, Meta(max_length=8_192)]  # an encrypted secret
UserToken = Annotated[str, Meta(min_length=1, max_length=16_384)]  # twice as long as one that is accepted
Command = Annotated[str, Meta(max_length=8_192)]
Folder = Annotated[str, Meta(max_length=1_024)]
Path = Annotated[str, Meta(max_length=1_024)]  # of a URL
Branch = Annotated[str, Meta(max_length=250)]
Text = Annotated[str, Meta(max_length=1_024)]  # a reason, for people
Euro = Annotated[str, Meta(max_length=32)]
Rate = Annotated[int, Meta(ge=0, le=1_000_000)]  # requests per 60 seconds; each is an entry of a list in Redis
ExitCode = Annotated[int, Meta(ge=-(2**31), le=2**32 - 1)]

EMAIL_LENGTH = 254  # characters
_EMAIL = re.compile(r"[A-Za-z0-9.!$%&'*+=^_`{|}~-]{1,64}@[A-Za-z0-9-]{1,63}(\.[A-Za-z0-9-]{1,63})+")


def is_email(text: str) -> bool:
    """Accepts only ASCII. Other letters can become ASCII ones in lower case, so two people could share an address.

    Refuses `/`, `?` and `#`, which end the part of a URL in which the address of a member stands.
    """
    return len(text) <= EMAIL_LENGTH and _EMAIL.fullmatch(text) is not None


def read_name(text: str, longest: int = 200) -> str:
    """Returns a name that people choose, with single spaces. Raises RequestMalformed."""
    name = " ".join(text.split())
    if not 0 < len(name) <= longest or not re.match(ONE_LINE, name):
        raise RequestMalformed(f"name: 1 to {longest} characters, without control characters.")
    return name


def parse_time(name: str, text: str) -> float:
    """Returns the seconds since the epoch of the parameter's time. Raises RequestMalformed."""
    try:
        return read_time(text)
    except ValueError:
        raise RequestMalformed(f"{name}: use {A_TIME}.") from None


def parse_span(since: str | None, until: str | None, first: str = "since", last: str = "until") -> TimeSpan:
    """Returns the span between the times of two parameters, which may be missing. Raises RequestMalformed."""
    span = TimeSpan(
        -math.inf if since is None else parse_time(first, since),
        math.inf if until is None else parse_time(last, until),
    )
    if span.since >= span.until:
        raise RequestMalformed(f"{first}: must be before {last}.")
    return span


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


def locate(fault: str) -> tuple[str, str]:
    """Returns what msgspec says is wrong, and where, such as `tools[0].type`; '' for the value as a whole."""
    found = _LOCATION.fullmatch(fault)
    return (found[1], found[2]) if found else (fault, "")


def explain(fault: str, kind: Any, path: str = "") -> str:
    """Returns the predicate of a sentence, such as `must not be empty`.

    `kind` is the type that refused the value, and `path` is where in it the fault is.
    """
    if _NO_CHOICE.match(fault):
        choices = _list_choices(*_describe(kind), re.findall(r"[^.\[]+", path))
        return f"must be {'one of ' * (len(choices) > 1)}{', '.join(choices)}"
    for pattern, words in _RULES:
        if found := pattern.fullmatch(fault):
            return words(found)
    return fault[:1].lower() + fault[1:]


@functools.cache
def _describe(kind: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the JSON schema of the type, and the components to which it refers."""
    (schema,), components = msgspec.json.schema_components([kind], ref_template="{name}")
    return schema, components


def _list_choices(schema: Mapping[str, Any], components: Mapping[str, Any], path: Sequence[str]) -> list[str]:
    """Returns the values that a JSON schema has at a path."""
    if "$ref" in schema:
        return _list_choices(components[schema["$ref"]], components, path)
    if "anyOf" in schema:
        return [choice for each in schema["anyOf"] for choice in _list_choices(each, components, path)]
    if not path:
        return [str(value) for value in schema.get("enum", ())]
    inner = schema.get("properties", {}).get(path[0]) or schema.get("items") or schema.get("additionalProperties")
    return _list_choices(inner, components, path[1:]) if isinstance(inner, dict) else []


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


_LOCATION = re.compile(r"(.*) - at `\$\.?(.*)`", re.DOTALL)
_NO_CHOICE = re.compile(r"Invalid (?:enum )?value ")
_RULES: list[tuple[re.Pattern[str], Callable[[re.Match[str]], str]]] = [
    (re.compile(r"Expected `(str|array|object)` of length (>=|<=) (\d+)"), _length),
    (re.compile(r"Expected `(?:int|float)` (>=|<=|>|<) (\S+)"), lambda m: f"must be {_BOUNDS[m[1]]} {m[2]}"),
    (re.compile(r"Expected `([\w| ]+)`, got `(\w+)`"), _type),
    (
        re.compile(r"Expected `str` matching regex (.*)"),
        lambda m: _PATTERNS.get(m[1], "does not have the required format"),
    ),
    (re.compile(r"Object missing required field `(.*)`"), lambda m: f"the field {m[1]} is missing"),
    (re.compile(r"Object contains unknown field `(.*)`"), lambda m: f"there is no field called {m[1]}"),
    (re.compile(r"JSON is malformed: (.*)"), lambda m: f"is not valid JSON: {m[1]}"),
    (re.compile(r"Input data was truncated"), lambda _: "is not valid JSON: it is truncated"),
    (re.compile(r"'utf-8' codec .*|Invalid UTF-8 .*"), lambda _: "is not UTF-8 text"),
]
