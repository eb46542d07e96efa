"""The parts of a token are read as PyJWT reads them, only quicker."""

import base64

import jwt
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from jwt.api_jws import PyJWS
from jwt.exceptions import DecodeError

from gateway.inference.users import QuickJWS, QuickJWT

CHARACTERS = b"ABCxyz019-_+/= .!\n\x00\xff"


def decode(reader: type[PyJWS], segment: bytes) -> bytes | str:
    try:
        return reader._decode_base64url_segment(segment, "header")
    except DecodeError as error:
        return f"refused: {error}"


@given(
    st.one_of(
        st.binary(max_size=40).map(base64.urlsafe_b64encode),
        st.binary(max_size=40).map(lambda data: base64.urlsafe_b64encode(data).rstrip(b"=")),
        st.lists(st.sampled_from(list(CHARACTERS)), max_size=12).map(bytes),
    )
)
@example(b"QQ")
@example(b"QR")  # bits that no byte has
@example(b"QQ==")
@example(b"QQ=")
@example(b"A")
@example(b"QQ\n")
def test_a_segment_reads_as_with_pyjwt(segment: bytes) -> None:
    assert decode(QuickJWS, segment) == decode(PyJWS, segment)


def claims(reader: jwt.PyJWT, payload: bytes) -> str:
    try:
        return repr(reader._decode_payload({"payload": payload}))
    except DecodeError:
        return "refused"


@pytest.mark.parametrize(
    "payload",
    [
        b'{"sub":"ana","exp":1900000000,"roles":["a"],"more":{"b":null,"c":1.5}}',
        b'{"sub":1,"sub":2}',
        b'{"sub":123456789012345678901234567890}',
        b'{"sub":%b}' % (b"1" * 5_000),
        b'{"exp":1e400}',
        b'{"exp":NaN}',
        b'{"name":"\\ud800"}',
        b"\xef\xbb\xbf{}",
        '{"name":"é"}'.encode("utf-16"),
        b'{"name":"\x01"}',
        b'{"name":"\xff"}',
        b'{"a":' * 100_000,
        b"[]",
        b'"text"',
        b"{} {}",
        b"{",
        b"",
    ],
)
def test_a_payload_reads_as_with_pyjwt(payload: bytes) -> None:
    assert claims(QuickJWT(), payload) == claims(jwt.PyJWT(), payload)
