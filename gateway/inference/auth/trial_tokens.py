"""Test tokens, with which account holders try their own apps: the gateway signs them, as the user `owner` of one app.

A test token is a JWT (HS256) with a header of its own, by which the hot path recognizes it. Its key is derived from
GATEWAY_ENCRYPTION_KEY and from the app's id, account and creation, so every process accepts it without a round trip,
the app's own backend is not asked, and the token ends with the app: an app of the same name is another one.
"""

import base64
import binascii
import time
from typing import Any, NamedTuple

import msgspec

from gateway.accounts.records import App
from gateway.accounts.vault import Vault
from gateway.errors import TokenInvalid

TEST_TOKEN_SECONDS = 600
USER = "owner"
PURPOSE = "test token"  # of the signature


class SignedToken(NamedTuple):
    token: str
    expires_at: int  # Unix seconds


def _encode(value: bytes) -> str:
    return base64.urlsafe_b64encode(value).rstrip(b"=").decode()


# Every test token begins with this, and no other JWT does.
HEADER = _encode(b'{"alg":"HS256","typ":"capsule-test"}') + "."
_HEADER = HEADER.encode()


def is_test_token(token: bytes) -> bool:
    """Returns whether the token claims to be a test token. Only `verify_test_token` says whether it is valid."""
    return token.startswith(_HEADER)


def sign_test_token(vault: Vault, app: App) -> SignedToken:
    """Returns a new test token of the app. Raises NoEncryptionKey."""
    now = int(time.time())
    claims = {"aud": app.name, "exp": now + TEST_TOKEN_SECONDS, "iat": now, "sub": USER}
    signing_input = HEADER + _encode(msgspec.json.encode(claims))
    signature = vault.sign(PURPOSE, _bind(signing_input.encode(), app))
    return SignedToken(f"{signing_input}.{_encode(signature)}", now + TEST_TOKEN_SECONDS)


def verify_test_token(vault: Vault, app: App, token: bytes) -> dict[str, Any]:
    """Returns the claims of a valid test token of this app. Raises TokenInvalid."""
    signing_input, _, signature = token.rpartition(b".")
    try:
        authentic = vault.is_signed(PURPOSE, _bind(signing_input, app), _decode(signature))
        claims = msgspec.json.decode(_decode(signing_input[len(_HEADER) :]), type=dict[str, Any]) if authentic else {}
    except (ValueError, msgspec.MsgspecError):
        raise TokenInvalid from None
    if not authentic:
        raise TokenInvalid(reason="signature")
    if time.time() >= claims["exp"]:
        raise TokenInvalid(reason="expired")
    return claims


def _bind(signing_input: bytes, app: App) -> bytes:
    """Returns what is signed: the token together with the app, also if another app gets its name or id."""
    return msgspec.json.encode((app.id, app.account, app.createdAt)) + signing_input


def _decode(segment: bytes) -> bytes:
    """Raises ValueError."""
    return binascii.a2b_base64(segment.replace(b"-", b"+").replace(b"_", b"/") + b"=" * (-len(segment) % 4))
