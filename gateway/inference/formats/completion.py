"""What all formats share: each decodes a body into a `CompletionRequest`, and encodes its answer."""

import re
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias, TypeVar

import msgspec

from gateway.errors import RequestMalformed, ServiceError
from gateway.inference.provider.chunks import CallPart, Delta
from gateway.settings.prices import Usage
from gateway.validation import explain, locate

encode = msgspec.json.Encoder().encode
# Any escape of a JSON text: a surrogate pair, half of one, or another.
_ESCAPE = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)", re.DOTALL
)
INVALID_BODY = (msgspec.MsgspecError, ValueError, RecursionError)
T = TypeVar("T")
# Gets the request id and the model.
MakeFormat: TypeAlias = Callable[[str, str], "Format"]


class FullAnswer(msgspec.Struct, frozen=True):
    """An answer that is not streamed."""

    text: str
    reasoning: str
    calls: list[CallPart]
    refusal: str = ""


class CompletionRequest(msgspec.Struct):
    """A request that may be sent to the provider, if one serves its model."""

    model: str
    max_tokens: int
    text_bytes: int  # priced: UTF-8 bytes, and the allowance for further messages
    stream: bool
    payload: bytes  # the provider's request body; empty after it was sent
    make_format: MakeFormat


KEEP_ALIVE = b": keep-alive\n\n"  # a comment, which event streams may have anywhere


class Format(Protocol):
    """Encodes one answer."""

    names_refusals: bool  # otherwise only the finish reason says that a text is a refusal

    def keep_alive(self) -> bytes:
        """Returns what shows the client that the answer goes on. It must be sent, because it may begin the answer."""

    def name_model(self, model: str) -> None:
        """Sets the model that answers, once it is known. Until then it is the requested one."""

    def chunks(self, deltas: list[Delta]) -> bytes: ...

    def texts(self, texts: list[bytes]) -> bytes:
        """Returns the chunks for texts that are already encoded as JSON."""

    def end(self, model: str, finish: str | None, usage: Usage | None) -> bytes: ...

    def error(self, error: ServiceError) -> bytes: ...

    def full(self, answer: FullAnswer, model: str, finish: str | None, usage: Usage | None) -> bytes: ...


def finish_reason(finish: str | None, *others: str) -> str:
    """Returns the provider's reason if the format knows it, else "stop". `others` are known only to one format."""
    return finish if finish in ("length", "content_filter", *others) else "stop"


def replace_halves(text: bytes) -> bytes:
    """Returns the JSON with U+FFFD for halves of surrogate pairs, which remain where a page cuts a text in two."""
    return _ESCAPE.sub(lambda escape: rb"\ufffd" if escape[1] else escape[0], text)


def invalid_json() -> RequestMalformed:
    return RequestMalformed("The body is not valid JSON in UTF-8.")


def malformed(error: Exception, kind: type) -> RequestMalformed:
    """Returns the error for a body that msgspec refused as this kind. It names the field, but never repeats a value."""
    if not isinstance(error, msgspec.ValidationError):
        return invalid_json()
    fault = str(error)
    # This message of msgspec would repeat a part of the request.
    if fault.startswith("Object contains unknown field"):
        return RequestMalformed("The body contains an unknown field.")
    fault, field = locate(fault)
    return RequestMalformed(f"{field or 'body'}: {explain(fault, kind, field)}.")


def decode_again(body: bytes, kind: type[T], fault: Callable[[Any, Exception], ServiceError]) -> T:
    """Decodes a body that the decoder refused, because it may write a whole number as 100.0.

    Raises what `fault` returns for the body's fields and their error.
    """
    try:
        fields = msgspec.json.decode(body)
    except INVALID_BODY:
        raise invalid_json() from None
    if isinstance(fields, dict):
        fields |= {n: int(v) for n, v in fields.items() if isinstance(v, float) and v.is_integer()}
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise fault(fields, error) from None
