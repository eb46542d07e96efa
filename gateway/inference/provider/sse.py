"""Decodes the provider's server-sent events: bytes go in; deltas, usage, a finish reason or a failure come out.

This module does no I/O. `AnswerReader` buffers received bytes until `read`, so that events that arrive together are
split, decoded and relayed together.

Most events of an answer differ only in the text of their token. The parts before and after it are the answer's `Frame`.
An event in this frame is not decoded; the JSON of its text is passed on unchanged.
"""

import contextlib
from typing import Annotated, Any

import msgspec
import structlog

from gateway.errors import ProviderFailed
from gateway.inference.provider.chunks import CallPart, Choice, Chunk, Delta
from gateway.inference.provider.dialects import (
    BROKEN,
    FINISH,
    KEEP_ALIVES,
    STOP,
    TOOL_CALLS,
    Calls,
    is_first_half,
    is_given,
    join_surrogates,
    read_leniently,
)
from gateway.inference.provider.errors import COMPLETION, ProviderSignal, classify, error_status, is_error
from gateway.log import origin_of
from gateway.settings.prices import Usage

logger = structlog.get_logger()

EVENT_BYTES = 1_048_576  # of one event
MAX_REPORTED_TOKENS = 1_000_000_000  # of one answer; they cost far more than any reservation
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
CR, LF = b"\r\n"  # as numbers: searching for one byte is five times as fast as searching for a byte string


DetailName = Annotated[str, msgspec.Meta(max_length=40)]
Tokens = Annotated[int, msgspec.Meta(ge=0, le=MAX_REPORTED_TOKENS)]


class Frame(msgspec.Struct, frozen=True, gc=False):
    """The parts of an event before and after its text, each with the text's quotation mark."""

    before: bytes
    after: bytes
    text: slice  # of the event, with both quotation marks


class ReportedUsage(msgspec.Struct):
    prompt_tokens: int | float
    completion_tokens: int | float
    total_tokens: Any = None

    @property
    def total(self) -> int:
        """The total, in which some providers count reasoning that they leave out of the completion. 0 without one."""
        total = self.total_tokens
        return int(total) if isinstance(total, (int, float)) and not total % 1 else 0


class UsageDetails(msgspec.Struct, omit_defaults=True):
    prompt_tokens_details: dict[DetailName, Tokens] | None = None
    completion_tokens_details: dict[DetailName, Tokens] | None = None


_decode_chunk = msgspec.json.Decoder(Chunk).decode
_decode_text = msgspec.json.Decoder(str).decode
_encode = msgspec.json.Encoder().encode
_decode_usage = msgspec.json.Decoder(ReportedUsage).decode
_decode_details = msgspec.json.Decoder(UsageDetails).decode
_INVALID = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_FRAME_SAMPLES = 4  # events from which an answer's frame may be derived: some providers vary it each time
_OTHER_TEXT = "\ue000"
_WORD_BYTES = 32  # an event of more is not a single word


class AnswerReader:
    """One streamed answer. It ends once: either `complete` or with a `failure`, whichever comes first."""

    __slots__ = (
        "_begun",
        "_calls",
        "_frame",
        "_half",
        "_reported",
        "_rest",
        "_samples_left",
        "complete",
        "eof",
        "failure",
        "finish",
        "inconsistent_usage",
        "model",
        "produced",
        "received",
        "refused",
        "signal",
        "unknown_finish",
    )

    def __init__(self, received: list[bytes]) -> None:
        """The connection appends bytes to `received`; `read` empties it."""
        self.received = received
        self._frame: Frame | None = None  # none once there is a finish reason or a failure
        self._samples_left = _FRAME_SAMPLES
        self._rest = b""  # the start of an incomplete event
        self._begun = False  # an event was read
        self.eof = False  # no more bytes will arrive
        self.complete = False
        self.failure: Exception | None = None
        self.signal: ProviderSignal | None = None
        # Characters of content, reasoning and tool calls. The provider bills an answer from the first one.
        self.produced = 0
        self._calls: Calls | None = None
        self._half = ""  # the first half of a surrogate pair, whose second half may follow
        self.refused = False  # the model refused the request in a text of its own
        self.finish: str | None = None  # one that clients know, or BROKEN
        self.unknown_finish = False  # the provider gave another one
        self.model: str | None = None
        self._reported: Usage | None = None  # the last report, which `usage` checks
        self.inconsistent_usage = False  # its numbers contradict each other

    @property
    def usage(self) -> Usage | None:
        """The usage that the provider reported last; None if it is invalid, such as zero tokens for some output."""
        reported = self._reported
        return None if reported is not None and not reported.output and self.produced else reported

    @property
    def unread(self) -> int:
        """Bytes received since the last read."""
        return sum(map(len, self.received))

    def fail(self, error: Exception, signal: ProviderSignal | None = None) -> None:
        """Ends the answer, unless it has ended already."""
        if self.failure is None and not self.complete:
            self.failure, self.signal, self._frame = error, signal, None

    def cut(self, error: Exception, signal: ProviderSignal | None = None) -> None:
        """Ends the answer where its bytes break off. With a finish reason it is complete."""
        if self.finish is not None:
            self._complete()
        else:
            self.fail(error, signal)

    def reject(self) -> None:
        """Ends the answer where its bytes cannot be read, which is a failure of the provider."""
        self.cut(ProviderFailed(), ProviderSignal.FAILED)

    def refuse(self, status: int, retry_after: float | None) -> None:
        """Ends the answer with an error status. The received bytes are the error's body."""
        body = b"".join(self.received)
        self.received.clear()
        self.fail(*classify(status, body, retry_after))

    def read_texts(self) -> list[bytes] | None:
        """Reads the texts of all received events as JSON. Returns None and reads nothing if one is not in the frame."""
        frame = self._frame
        if frame is None or self._rest or self._half:
            return None
        before, after, place = frame.before, frame.after, frame.text
        texts, produced = [], 0
        try:
            for event in self.received:
                if not (event.startswith(before) and event.endswith(after)):
                    return None
                text = event[place]
                length = len(_decode_text(text))
                if not length:
                    return None
                produced += length
                texts.append(text)
        except _INVALID:
            return None
        self.received.clear()
        self.produced += produced
        return texts

    def read(self) -> list[Delta]:
        """Reads the events since the last read, and returns their deltas. Ends the answer at its last event."""
        deltas: list[Delta] = []
        try:
            self._read(deltas)
        except Exception as error:
            # Whatever the reader does not expect, the provider has sent it. Otherwise the request would end as a fault
            # of the service, at no other provider, and at its bound.
            logger.error("provider.unreadable", error=origin_of(error))
            self.reject()
        return deltas

    def _read(self, deltas: list[Delta]) -> None:
        received = self.received
        data = received[0] if len(received) == 1 else b"".join(received)
        received.clear()
        if self._rest:
            data = self._rest + data
        if CR in data:
            data = self._normalize_newlines(data)
        events = data.split(b"\n\n")
        self._rest = events.pop()
        if len(self._rest) > EVENT_BYTES:
            self.reject()
        if self.eof and self._rest:
            events.append(self._rest)
            self._rest = b""
        if events and not self._begun:
            self._begun = True
            events[0] = events[0].removeprefix(BYTE_ORDER_MARK)
        for event in events:
            if self.complete or self.failure is not None:
                break
            if event.startswith(b"data: ") and LF not in event:
                self._read_event(event[6:], deltas)
            else:
                self._read_fields(event, deltas)
        if self.eof and not self.complete:
            self._end()

    def _normalize_newlines(self, data: bytes) -> bytes:
        # A final CR may be half of a CRLF, so it stays until the next read.
        held = b"\r" if data.endswith(b"\r") and not self.eof else b""
        return data[: len(data) - len(held)].replace(b"\r\n", b"\n").replace(b"\r", b"\n") + held

    def _read_fields(self, event: bytes, deltas: list[Delta]) -> None:
        """Reads an event that has more than one line of data."""
        name, data = _fields_of(event)
        if name == b"error":
            self._refuse(data)
        elif data and name != b"ping":
            self._read_event(data, deltas)
        elif event.lstrip().startswith(b"{"):  # a whole answer as JSON
            self._read_event(event, deltas)

    def _read_event(self, data: bytes, deltas: list[Delta]) -> None:
        length = len(data)
        if length <= _WORD_BYTES:
            word = data.strip()
            if word == b"[DONE]":
                return self._end()
            if word in KEEP_ALIVES:
                return None
        if length > EVENT_BYTES:
            return self.reject()
        lenient = False
        try:
            chunk = _decode_chunk(data)
        except _INVALID:
            read = read_leniently(data)
            if read is None:
                return self.reject()
            chunk, lenient = read, True
        if chunk.choices and self.finish is None:  # what follows the finish reason is no part of the answer
            choice = chunk.choices[0]
            if choice.index:
                return None
            delta = choice.delta or choice.message
            if delta is not None:
                if lenient or self._half:
                    self._mend(delta)
                size = len(delta.content or delta.reasoning_content or delta.reasoning or "")
                if delta.tool_calls or delta.function_call or delta.refusal:
                    size += self._read_others(delta)
                if size:
                    # An answer of one token does not need a frame.
                    if self.produced and self._samples_left and delta.content and not lenient:
                        self._samples_left -= 1
                        self._frame = _frame_of(data, delta.content) or self._frame
                    self.produced += size
                    deltas.append(delta)
            if choice.finish_reason or choice.error:
                self._read_finish(choice, deltas)
        if self.model is None:
            self.model = chunk.model
        if chunk.usage:
            self._read_usage(chunk.usage)
        if (chunk.error and is_given(chunk.error)) or (chunk.choices is None and not chunk.usage and is_error(data)):
            self._refuse(data)
        return None

    def _read_others(self, delta: Delta) -> int:
        """Numbers the parts of tool calls. Returns the size of what is not text."""
        calls = list(delta.tool_calls or ())
        if delta.function_call is not None:
            calls.append(CallPart(function=delta.function_call))
            delta.function_call = None
        if calls:
            self._calls = self._calls or Calls()
            delta.tool_calls = [self._calls.number(part) for part in calls]
        self.refused |= bool(delta.refusal)
        return (len(_encode(delta.tool_calls)) if calls else 0) + len(delta.refusal or "")

    def _mend(self, delta: Delta) -> None:
        """Joins the halves of surrogate pairs, which some providers send in two events."""
        content = self._half + (delta.content or "")
        self._half = content[-1:] if content and is_first_half(content[-1]) else ""
        delta.content = join_surrogates(content.removesuffix(self._half)) or None

    def _read_finish(self, choice: Choice, deltas: list[Delta]) -> None:
        given = (choice.finish_reason or "").lower()
        if choice.error and is_given(choice.error):
            given = BROKEN
        if given in ("", "null"):
            return
        self.unknown_finish = given not in FINISH
        self.finish, self._frame = FINISH.get(given, STOP), None
        if self._half:
            self._half = ""
            deltas.append(Delta(content="\ufffd"))
        if self.finish in (STOP, TOOL_CALLS):  # some providers say the one for the other
            self.finish = STOP if self._calls is None else TOOL_CALLS
            if self._calls is not None and (rest := self._calls.without_arguments()):
                deltas.append(Delta(tool_calls=rest))

    def _refuse(self, data: bytes) -> None:
        """Ends the answer with the error in an event, unless it is complete already."""
        self.cut(*classify(error_status(data), data))

    def _read_usage(self, raw: msgspec.Raw) -> None:
        # The last valid report counts. One with a negative or fractional number of tokens is ignored. A huge number is
        # reduced, because floats, JSON readers or Redis may not hold it; it costs more than any reservation anyway.
        text = bytes(raw)
        if text == b"null":
            return
        try:
            reported = _decode_usage(text)
        except _INVALID:
            return
        into, out = reported.prompt_tokens, reported.completion_tokens
        if into < 0 or out < 0 or into % 1 or out % 1:
            return
        into, out = int(into), int(out)
        if reported.total_tokens != into + out:
            out = max(out, reported.total - into)
        if self._reported is not None and not (into or out):
            return
        details, reasoning = None, 0
        if b"_details" in text and (details := _read_details(text)) is not None:
            reasoning = details.get("completion_tokens_details", {}).get("reasoning_tokens", 0)
        self._reported = Usage(min(into, MAX_REPORTED_TOKENS), min(out, MAX_REPORTED_TOKENS), details)
        self.inconsistent_usage = out > reported.completion_tokens or reasoning > out

    def _end(self) -> None:
        if self.finish is not None:
            self._complete()  # some providers omit [DONE]
        else:
            self.fail(ProviderFailed(), ProviderSignal.FAILED)

    def _complete(self) -> None:
        if self.finish == BROKEN:  # only now, because the usage follows the reason
            self.fail(ProviderFailed(), ProviderSignal.FAILED)
        elif self.failure is None:
            self.complete = True
            self.signal = COMPLETION


def _read_details(usage: bytes) -> dict[str, dict[str, int]] | None:
    """Returns the details of a usage, as callers get them. None if there are none, or they are not numbers."""
    with contextlib.suppress(*_INVALID):
        return msgspec.to_builtins(_decode_details(usage)) or None
    return None


def _frame_of(data: bytes, text: str) -> Frame | None:
    """Returns the frame of an event, or None if another text in its place would change more than the text."""
    before, found, after = data.rpartition(_encode(text))
    if not found:
        return None
    try:
        other = _decode_chunk(before + _encode(_OTHER_TEXT) + after)
    except _INVALID:
        return None
    if is_given(other.usage) or is_given(other.error):
        return None
    if other.choices != [Choice(Delta(content=_OTHER_TEXT))]:
        return None
    head, tail = b'data: %b"' % before, b'"%b\n\n' % after
    return Frame(head, tail, slice(len(head) - 1, 1 - len(tail)))


def _fields_of(event: bytes) -> tuple[bytes, bytes]:
    """Returns an event's name and its data lines, joined. Leaves out comments and other fields."""
    name, lines = b"", []
    for line in event.split(b"\n"):
        if line.startswith(b"data:"):
            lines.append(line[5:].removeprefix(b" "))
        elif line.startswith(b"event:"):
            name = line[6:].strip()
    return name, b"\n".join(lines)
