"""Limits the length and size of values from clients, and explains in plain words which one is invalid.

Each field of a request's body has one of the types below. The body as a whole is also limited, but a field of a
megabyte would be read, compared and listed again and again. Of a value, a message repeats only an invalid choice.
"""

import math
import re
from collections.abc import Callable
from typing import Annotated

from msgspec import Meta

from gateway.errors import RequestMalformed
from gateway.ids import A_TIME, TimeSpan, read_time

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
_PATTERNS: dict[str, str] = {}  # the words for a text that does not match, by the expression as a fault quotes it


def declare_pattern(expression: str, words: str) -> str:
    """Returns the regular expression. `explain` says these words of a text that does not match it."""
    _PATTERNS[repr(expression)] = words
    return expression


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
    (
        re.compile(r"Expected `str` matching regex (.*)"),
        lambda m: _PATTERNS.get(m[1], "does not have the required format"),
    ),
    (re.compile(r"Object missing required field `(.*)`"), lambda m: f"the field {m[1]} is missing"),
    (re.compile(r"Object contains unknown field `(.*)`"), lambda m: f"there is no field called {m[1]}"),
    (re.compile(r"Invalid (?:enum )?value (.*)", re.DOTALL), lambda m: f"{m[1]} is not one of the choices"),
    (re.compile(r"JSON is malformed: (.*)"), lambda m: f"is not valid JSON: {m[1]}"),
    (re.compile(r"Input data was truncated"), lambda _: "is not valid JSON: it is truncated"),
    (re.compile(r"'utf-8' codec .*|Invalid UTF-8 .*"), lambda _: "is not UTF-8 text"),
]
