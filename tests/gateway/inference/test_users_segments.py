"""The segments of a token are read as PyJWT reads them, only quicker."""

import base64

from hypothesis import example, given
from hypothesis import strategies as st
from jwt.api_jws import PyJWS
from jwt.exceptions import DecodeError

from gateway.inference.users import QuickJWS

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
