"""Secrets that are encrypted at rest."""

from __future__ import annotations

import base64
import hashlib

from cryptography.fernet import Fernet, InvalidToken, MultiFernet


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
