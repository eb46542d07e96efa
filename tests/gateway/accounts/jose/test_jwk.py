"""Parsing key sets, and the cost of hostile ones."""

import base64
import json
import math
import time
from typing import Any

import msgspec
import pytest

from gateway.accounts.jose.jwk import MAX_KEYS, SLICE, PublicKey, find_keys, public_part, read_key, split_document
from gateway.inference.auth.key_sets import FETCH_BYTES
from tests.fakes.backend import jwk, private_key
from tests.fakes.jwks import EC, ED, LEFT_OUT, READ, RSA, number, publish


def read(document: Any) -> list[PublicKey | None]:
    body = document if isinstance(document, bytes) else json.dumps({"keys": document}).encode()
    return [read_key(text) for text in split_document(body)]


@pytest.mark.parametrize("fault", LEFT_OUT)
def test_a_faulty_key_does_not_affect_the_others(fault: str) -> None:
    """And its public part is no key either. A byte order mark is skipped."""
    document = {"keys": [EC, LEFT_OUT[fault], RSA]}
    before, faulty, after = read(b"\xef\xbb\xbf" + json.dumps(document).encode())
    assert faulty is None
    assert before is not None
    assert after is not None
    part = public_part(msgspec.Raw(json.dumps(LEFT_OUT[fault]).encode()))
    assert not part or read_key(msgspec.Raw(part)) is None


def test_the_two_names_of_an_edwards_key_are_one_algorithm() -> None:
    keys = read([ED | {"alg": alg} for alg in ("EdDSA", "Ed25519", None)])
    assert [key and key.algorithms for key in keys] == [("Ed25519", "EdDSA")] * 3
    assert read([ED | {"alg": alg} for alg in ("Ed448", "ES256")]) == [None, None]


@pytest.mark.parametrize("good", [EC, RSA, ED])
def test_private_and_unknown_members_are_not_read(good: dict[str, Any]) -> None:
    """With `d` and without primes, a library would compute `pow(17, e * d, n)` with numbers of any size."""
    private = {"d": number(100_000), "p": 5, "q": None, "dp": [], "oth": [{}], "k": "x", "x5c": [1], "x5u": {}}
    (key,) = read([good | private])
    assert key is not None
    assert not hasattr(key.key, "private_numbers")
    assert not hasattr(key.key, "private_bytes")


@pytest.mark.parametrize("name", READ)
def test_a_key_is_read(name: str) -> None:
    published = publish(name)
    *others, other, key = read(published.document["keys"])
    assert not any(others)
    assert other is not None
    assert key is not None
    assert key.kid == published.kid
    assert key.key == published.private.public_key()
    assert key in find_keys([other, key], published.kid, published.alg)
    assert not {"HS256", "none", "ES256K"} & {*key.algorithms}
    text = msgspec.Raw(json.dumps(published.document["keys"][-1]).encode())
    assert read_key(msgspec.Raw(public_part(text))) == key


def test_sizes_that_are_allowed() -> None:
    largest = RSA | {"n": number(8192), "e": base64.urlsafe_b64encode(b"\0\xff\xff\xff\xff").decode()}
    padded = RSA | {"n": base64.urlsafe_b64encode(b"\0" + base64.urlsafe_b64decode(RSA["n"] + "==")).decode()}
    longest_kid = EC | {"kid": "k" * 200}
    assert all(
        read([largest, padded, RSA | {"n": RSA["n"] + "=="}, longest_kid, jwk("ES512", private_key("ES512"), "k")])
    )


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


def time_additions() -> float:
    """Returns how long 500,000 additions take: some 25 ms, or more on a slow machine."""
    began, total = time.thread_time(), 0
    for each in range(500_000):
        total += each & 3
    return time.thread_time() - began


@pytest.mark.parametrize("name", HOSTILE)
def test_no_document_blocks_the_event_loop_for_long(name: str) -> None:
    """Other work runs between slices of ten keys."""
    body = HOSTILE[name]
    assert len(body) <= FETCH_BYTES
    shortest = math.inf
    for _ in range(5):  # other work on the machine slows some rounds
        texts: list[msgspec.Raw] = []
        longest = 0.0
        for start in range(-SLICE, MAX_KEYS, SLICE):
            began = time.thread_time()
            if start < 0:
                try:
                    texts = split_document(body)
                except (ValueError, RecursionError):
                    break
            else:
                for text in texts[start : start + SLICE]:
                    read_key(text)
            longest = max(longest, time.thread_time() - began)
        shortest = min(shortest, longest / time_additions())
        if shortest < 1:
            break
    assert len(texts) <= MAX_KEYS
    assert shortest < 1, "half of that where this was written"


def test_keys_that_may_have_signed_a_token() -> None:
    """At most four. Those with its `kid` come first, and those with another one never count."""
    key = read_key(msgspec.Raw(json.dumps(EC).encode()))
    assert key is not None
    named = [msgspec.structs.replace(key, kid=kid) for kid in (None, "other", "mine", None, "mine", "mine", "mine")]
    assert [each.kid for each in find_keys(named, "mine", "ES256")] == ["mine"] * 4
    assert [each.kid for each in find_keys(named[:5], "mine", "ES256")] == ["mine", "mine", None, None]
    assert [each.kid for each in find_keys(named, None, "ES256")] == [None, None, "other", "mine"]
    assert [each.kid for each in find_keys(named, "unknown", "ES256")] == [None, None]
    for alg in ("ES384", "RS256", "HS256", "none", "EdDSA", ""):
        assert find_keys(named, "mine", alg) == []
