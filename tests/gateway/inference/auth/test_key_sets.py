"""Parsing key sets, and the cost of hostile ones."""

import base64
import json
import secrets
import time
from typing import Any

import msgspec
import pytest

from gateway.inference.auth import key_sets
from gateway.inference.auth.key_sets import FETCH_BYTES, MAX_KEYS, Key, read_key, split_document
from tests.fakes.backend import jwk, private_key

EC, RSA, ED = (jwk(alg, private_key(alg), "good") for alg in ("ES256", "RS256", "EdDSA"))


def read(document: Any) -> list[Key | None]:
    body = document if isinstance(document, bytes) else json.dumps({"keys": document}).encode()
    return [read_key(text) for text in split_document(body)]


def number(bits: int, last: int = 1) -> str:
    value = secrets.randbits(bits) | 1 << (bits - 1) | 1
    return base64.urlsafe_b64encode((value - 1 + last).to_bytes((bits + 7) // 8, "big")).rstrip(b"=").decode()


FAULTS: dict[str, Any] = {
    "key_ops are for something else": EC | {"key_ops": ["sign"]},
    "key_ops is a text": EC | {"key_ops": "verify"},
    "key_ops holds a number": EC | {"key_ops": ["verify", 5]},
    "use is a list": EC | {"use": ["sig"]},
    "use is encryption": EC | {"use": "enc"},
    "use is for something else": EC | {"use": "SIG"},
    "kid is a list": EC | {"kid": ["k"]},
    "kid is true": EC | {"kid": True},
    "kid is a fraction": EC | {"kid": 1.5},
    "kid is a long number": EC | {"kid": 10**201},
    "alg is a list": EC | {"alg": ["ES256"]},
    "crv is a list": EC | {"crv": ["P-256"]},
    "crv is an object": EC | {"crv": {}},
    "x is a number": EC | {"x": 5},
    "x is null": EC | {"x": None},
    "x is no base64": EC | {"x": "ü" * 43},
    "x is long": EC | {"x": "A" * 100_000},
    "not on the curve": EC | {"y": EC["x"]},
    "n is missing": {k: v for k, v in RSA.items() if k != "n"},
    "n is a list": RSA | {"n": [1]},
    "n is small": RSA | {"n": number(1024)},
    "n is large": RSA | {"n": number(8193)},
    "n is huge": RSA | {"n": number(200_000)},
    "n is even": RSA | {"n": number(2048, last=0)},
    "n is zero": RSA | {"n": "AA"},
    "e is one": RSA | {"e": "AQ"},
    "e is even": RSA | {"e": "AQAC"},
    "e is large": RSA | {"e": number(33)},
    "e is empty": RSA | {"e": ""},
    "kty is a number": RSA | {"kty": 5},
    "kty is missing": {k: v for k, v in RSA.items() if k != "kty"},
    "a symmetric key": {"kty": "oct", "k": "c2VjcmV0", "alg": "HS256"},
    "a number": 5,
    "null": None,
    "a list": [EC],
    "a text": "key",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_key_does_not_affect_the_others(fault: str) -> None:
    before, faulty, after = read([EC, FAULTS[fault], RSA])
    assert faulty is None
    assert before is not None
    assert after is not None


@pytest.mark.parametrize(
    ("alg", "allowed"),
    [
        ("EdDSA", ("Ed25519", "EdDSA")),
        ("Ed25519", ("Ed25519", "EdDSA")),
        (None, ("Ed25519", "EdDSA")),
        ("Ed448", None),
        ("ES256", None),
    ],
)
def test_the_two_names_of_an_edwards_key_are_one_algorithm(alg: str | None, allowed: tuple[str, ...] | None) -> None:
    (key,) = read([ED | {"alg": alg}])
    assert (key and key.algorithms) == allowed


@pytest.mark.parametrize("good", [EC, RSA, ED])
def test_private_and_unknown_members_are_not_read(good: dict[str, Any]) -> None:
    """With `d` and without primes, a library would compute `pow(17, e * d, n)` with numbers of any size."""
    private = {"d": number(100_000), "p": 5, "q": None, "dp": [], "oth": [{}], "k": "x", "x5c": [1], "x5u": {}}
    (key,) = read([good | private])
    assert key is not None
    assert not hasattr(key.key, "private_numbers")
    assert not hasattr(key.key, "private_bytes")


@pytest.mark.parametrize(
    "member",
    [{"kid": None}, {"alg": None}, {"use": None}, {"use": ""}, {"key_ops": None}, {"key_ops": []}],
    ids=lambda member: json.dumps(member),
)
def test_some_members_may_be_null_or_empty(member: dict[str, Any]) -> None:
    (key,) = read([EC | member])
    assert key is not None


def test_a_kid_that_is_a_number_is_a_text() -> None:
    (key,) = read([EC | {"kid": 5}])
    assert key is not None
    assert key.kid == "5"


def test_a_byte_order_mark_is_skipped() -> None:
    (key,) = read(b"\xef\xbb\xbf" + json.dumps({"keys": [EC]}).encode())
    assert key is not None


def test_sizes_that_are_allowed() -> None:
    largest = RSA | {"n": number(8192), "e": base64.urlsafe_b64encode(b"\0\xff\xff\xff\xff").decode()}
    padded = RSA | {"n": base64.urlsafe_b64encode(b"\0" + base64.urlsafe_b64decode(RSA["n"] + "==")).decode()}
    assert all(read([largest, padded, jwk("ES512", private_key("ES512"), "k")]))


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"null", b"{}", b'{"keys":{}}', b'{"keys":null}', b"[" * 9000, b"\xff", b'{"keys":["\\ud800"]}'],
)
def test_documents_that_are_not_key_sets(body: bytes) -> None:
    with pytest.raises((ValueError, RecursionError)):
        read(body)


def repeat(item: bytes) -> bytes:
    return b'{"keys":[' + b",".join([item] * ((FETCH_BYTES - 12) // (len(item) + 1))) + b"]}"


HOSTILE = {
    "numbers": repeat(b"1"),
    "objects": repeat(b"{}"),
    "many keys": repeat(json.dumps(EC).encode()),
    "large RSA keys": repeat(json.dumps(RSA | {"n": number(8192)}).encode()),
    "a long number": b'{"keys":[' + b"1" * (FETCH_BYTES - 11) + b"]}",
    "members": b'{"keys":[{"kty":"EC"' + b',"a":[]' * ((FETCH_BYTES - 30) // 7) + b"}]}",
    "operations": repeat(b'{"kty":"EC","key_ops":[' + b",".join([b'"x"'] * 600) + b"]}"),
    "nesting": repeat(b'{"kty":' * 400 + b"1" + b"}" * 400),
    "private": json.dumps({"keys": [RSA | {"n": number(8192), "e": number(99), "d": number(150_000)}]}).encode(),
    "even e, huge": json.dumps({"keys": [RSA | {"e": number(190_000)}]}).encode(),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_no_document_blocks_the_event_loop_for_long(name: str) -> None:
    """Other work runs between slices of ten keys."""
    body = HOSTILE[name]
    assert len(body) <= FETCH_BYTES
    steps = []
    for _ in range(5):
        texts: list[msgspec.Raw] = []
        longest = 0.0
        for start in range(-key_sets.SLICE, MAX_KEYS, key_sets.SLICE):
            began = time.thread_time()
            if start < 0:
                try:
                    texts = split_document(body)
                except (ValueError, RecursionError):
                    break
            else:
                for text in texts[start : start + key_sets.SLICE]:
                    read_key(text)
            longest = max(longest, time.thread_time() - began)
        steps.append(longest)
    assert len(texts) <= MAX_KEYS
    assert min(steps) < 0.02, "8 ms at most where this was written"


def test_a_long_kid_makes_a_key_unusable() -> None:
    key = jwk("ES256", private_key("ES256"), "k" * 200)
    assert read_key(msgspec.Raw(json.dumps(key).encode())) is not None
    assert read_key(msgspec.Raw(json.dumps({**key, "kid": "k" * 201}).encode())) is None
