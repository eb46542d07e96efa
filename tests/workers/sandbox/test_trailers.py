"""Which bytes of an app's response reach its visitor."""

import time

import pytest

from workers.sandbox.trailers import HEAD_BYTES, LINE_BYTES, ResponseReader

COOKIE = b"Set-Cookie: a=1; Domain=apps.test\r\n"
CHUNKS = b"HTTP/1.1 200 OK\r\ntransfer-Encoding: chunked\r\n\r\n"
LAST = b"0\r\n\r\n"
UNCHANGED = [
    b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok",
    b"HTTP/1.0 200 OK\n\nuntil the end\r\n0\r\n" + COOKIE,
    b"HTTP/1.1 304\r\n\r\n",
    b"HTTP/1.1 103 Early Hints\r\nLink: <a>\r\n\r\nHTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 \r\n\r\n0\r\n",
    b"HTTP/1.1 101 Switching Protocols\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n" + COOKIE,
    CHUNKS + LAST,
    CHUNKS + b'3;name="a"\r\nabc\r\nA \r\n0123456789\r\n' + LAST,
    CHUNKS + b"5\r\n0\r\n\r\n\r\n" + LAST,
    b"HTTP/1.1 103 Early Hints\r\nTransfer-Encoding: chunked\r\n\r\n" + CHUNKS + b"1\r\na\r\n" + LAST,
    CHUNKS + b"3\r\nab",  # cut, and not completed here
]


@pytest.mark.parametrize("step", [1, 2, 7, 65_536])
def test_trailers_are_cut_off(step: int) -> None:
    head = CHUNKS.replace(b"\r\n\r\n", b"\r\nTrailer: Set-Cookie\r\n\r\n")
    for chunks in (b"", b"2\r\nok\r\n", b"2\r\nok\r\n1\r\n\n\r\n"):
        for trailers in (COOKIE, b"X: 1\r\n" + COOKIE * 3, COOKIE.replace(b"\r\n", b"\n"), b" " + COOKIE):
            for end in (b"0\r\n", b"0000 ;a=b\r\n"):
                assert passed_on(head + chunks + end + trailers + b"\r\n" + LAST, step) == head + chunks + end + b"\r\n"


@pytest.mark.parametrize("step", [1, 3, 65_536])
@pytest.mark.parametrize("response", UNCHANGED, ids=range(len(UNCHANGED)))
def test_everything_else_passes_unchanged(response: bytes, step: int) -> None:
    assert passed_on(response, step) == response


def test_each_byte_passes_as_soon_as_its_part_is_known() -> None:
    response = ResponseReader()
    assert response.pass_on(CHUNKS[:-1]) == b""
    assert response.pass_on(CHUNKS[-1:] + b"1") == CHUNKS
    assert response.pass_on(b"2\r\nab") == b"12\r\nab"
    assert response.pass_on(b"c") == b"c"


@pytest.mark.parametrize(
    "response",
    [
        b"220 mail.example.com ESMTP\r\n\r\n",
        b"HTTP/2.0 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n Transfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: a\r\n Transfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding : chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\rTransfer-Encoding: chunked\r\n\r\n",
        CHUNKS + b"\r\n",
        CHUNKS + b" 1\r\na\r\n",
        CHUNKS + b"1\na\r\n",
        CHUNKS + b"-1\r\na\r\n",
        CHUNKS + b"1" * 16 + b"\r\n",
        CHUNKS + b"1;" + b"a" * LINE_BYTES,
        b"HTTP/1.1 200 OK\r\nX: " + b"a" * HEAD_BYTES,
    ],
    ids=range(13),
)
def test_what_may_be_read_in_two_ways_is_refused(response: bytes) -> None:
    with pytest.raises(OSError, match="the app's response"):
        passed_on(response, 65_536)


def test_many_chunks_and_many_interim_responses_take_little_time() -> None:
    began = time.process_time()
    passed_on(CHUNKS + b"1\r\na\r\n" * 100_000 + LAST, 65_536)
    passed_on(b"HTTP/1.1 103 \r\n\r\n" * 100_000, 65_536)
    assert time.process_time() - began < 2


def passed_on(response: bytes, step: int) -> bytes:
    reading = ResponseReader()
    return b"".join(reading.pass_on(response[at : at + step]) for at in range(0, len(response), step))
