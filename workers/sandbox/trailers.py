"""Cuts the trailers off an app's responses. Caddy would pass them on uncleaned, even those that no header announces.

A response passes unchanged up to its last chunk. What Caddy might read in another way is refused: it must not find a
chunk where this module finds none.
"""

import enum
import re

HEAD_BYTES = 131_072  # more than Caddy reads
LINE_BYTES = 4_096  # of a chunk's size and its extensions
HEAD_END = re.compile(rb"\n\r?\n")
HEAD = re.compile(rb"HTTP/1\.[01] ([0-9]{3})(?: [^\r\n]*)?\r?\n((?:[!#$%&'*+.^_`|~\w-]+:[^\r\n]*\r?\n)*)\r?\n")
CHUNKED = re.compile(rb"^transfer-encoding:", re.IGNORECASE | re.MULTILINE)
SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[^\r\n]*)?\r\n")


class ResponsePart(enum.Enum):
    HEAD = enum.auto()
    SIZE = enum.auto()
    CHUNK = enum.auto()
    UNCHUNKED = enum.auto()  # a body without chunks, or another protocol
    END = enum.auto()


class ResponseReader:
    """The responses to one request: interim ones, and the final one."""

    def __init__(self) -> None:
        self._part, self._held, self._left = ResponsePart.HEAD, b"", 0

    def pass_on(self, data: bytes) -> bytes:
        """Returns what of the app's bytes goes to the visitor now. Raises OSError if they are no response."""
        if self._part is ResponsePart.UNCHUNKED:
            return data
        held, at = self._held + data, 0
        while at < len(held):
            match self._part:
                case ResponsePart.HEAD:
                    end = self._read_head(held, at)
                case ResponsePart.SIZE:
                    end = self._read_size(held, at)
                case ResponsePart.CHUNK:
                    end = min(at + self._left, len(held))
                    self._left -= end - at
                    self._part = ResponsePart.CHUNK if self._left else ResponsePart.SIZE
                case ResponsePart.UNCHUNKED:
                    end = len(held)
                case ResponsePart.END:
                    return b""
            if end == at:
                break
            at = end
            if self._part is ResponsePart.END:
                self._held = b""
                return held[:at] + b"\r\n"
        self._held = held[at:]
        return held[:at]

    def _read_head(self, held: bytes, at: int) -> int:
        """Returns where the head ends, or `at` while it is incomplete."""
        end = HEAD_END.search(held, at)
        if end is None:
            return wait_for_more(held, at, HEAD_BYTES)
        head = HEAD.fullmatch(held, at, end.end())
        if head is None:
            raise OSError("the app's response has an invalid head")
        if head[1] == b"101" or not (head[1].startswith(b"1") or CHUNKED.search(head[2])):
            self._part = ResponsePart.UNCHUNKED
        elif not head[1].startswith(b"1"):
            self._part = ResponsePart.SIZE
        return end.end()

    def _read_size(self, held: bytes, at: int) -> int:
        end = held.find(b"\n", at) + 1
        if not end:
            return wait_for_more(held, at, LINE_BYTES)
        size = SIZE.fullmatch(held, at, end)
        if size is None:
            raise OSError("the app's response has an invalid chunk")
        self._left = int(size[1], 16) + 2  # the line break after it
        self._part = ResponsePart.CHUNK if self._left > 2 else ResponsePart.END
        return end


def wait_for_more(held: bytes, at: int, most: int) -> int:
    if len(held) - at > most:
        raise OSError("the app's response has too long a line or head")
    return at
