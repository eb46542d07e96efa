"""Keys that are shown once and kept as a hash, and secrets that are kept encrypted."""

from __future__ import annotations

import base64
import hashlib
import random
import secrets
import time

from cryptography.fernet import Fernet, InvalidToken, MultiFernet


def new_id(kind: str) -> str:
    """Such as `acc_01kad0e5q3f8…`: sorts by time, then random."""
    return f"{kind}_{int(time.time() * 1000):011x}{secrets.token_hex(5)}"


def request_id() -> str:
    """80 bits that nobody has to guess or keep secret: no system call, unlike what the others take theirs from."""
    return f"{random.getrandbits(80):020x}"


def new_key(kind: str) -> str:
    """256 random bits, such as `csk_…`."""
    return f"{kind}_{secrets.token_urlsafe(32)}"


def digest(key: str) -> str:
    """A key has 256 random bits, so that a plain hash cannot be searched."""
    return hashlib.sha256(key.encode()).hexdigest()


class NoEncryptionKey(Exception):
    pass


class Vault:
    """Encrypts what must be readable again: webhook secrets, app auth secrets.

    Several comma separated keys: the first encrypts, all decrypt, so that a key is replaced without a gap.
    """

    def __init__(self, keys: str) -> None:
        derived = [hashlib.sha256(b"capsule at rest:" + k.strip().encode()).digest() for k in keys.split(",") if k]
        self._fernet = MultiFernet([Fernet(base64.urlsafe_b64encode(k)) for k in derived]) if derived else None

    def seal(self, secret: str) -> str:
        if self._fernet is None:
            raise NoEncryptionKey("set GATEWAY_ENCRYPTION_KEY, without which no secret is stored")
        return self._fernet.encrypt(secret.encode()).decode()

    def open(self, sealed: str) -> str:
        if self._fernet is None:
            raise NoEncryptionKey("GATEWAY_ENCRYPTION_KEY is not set, but a stored secret needs it")
        try:
            return self._fernet.decrypt(sealed).decode()
        except InvalidToken:
            raise NoEncryptionKey("GATEWAY_ENCRYPTION_KEY is not the key a stored secret was written with") from None
