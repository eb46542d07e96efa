"""Encrypts secrets that the service must read again, such as webhook secrets and app auth secrets, and signs tokens."""

import base64
import hashlib
import hmac
from contextlib import suppress


class NoEncryptionKey(Exception):
    """GATEWAY_ENCRYPTION_KEY is unset, or does not decrypt the stored secret."""


class Vault:
    """Takes comma-separated keys. The first one encrypts and all of them decrypt, so keys rotate without downtime.

    cryptography is imported late: the command line, which imports this module, is installed without it.
    """

    def __init__(self, keys: str) -> None:
        from cryptography.fernet import Fernet, MultiFernet

        derived = [hashlib.sha256(b"capsule at rest:" + k.strip().encode()).digest() for k in keys.split(",") if k]
        self._signing = [hashlib.sha256(b"capsule signs:" + k.strip().encode()).digest() for k in keys.split(",") if k]
        self._fernets = [Fernet(base64.urlsafe_b64encode(k)) for k in derived]
        self._fernet = MultiFernet(self._fernets) if derived else None

    def seal(self, secret: str) -> str:
        if self._fernet is None:
            raise NoEncryptionKey("set GATEWAY_ENCRYPTION_KEY; the service stores no secrets without it")
        return self._fernet.encrypt(secret.encode()).decode()

    def open(self, sealed: str) -> str:
        if self._fernet is None:
            raise NoEncryptionKey("GATEWAY_ENCRYPTION_KEY is not set, but a stored secret needs it")
        from cryptography.fernet import InvalidToken

        try:
            return self._fernet.decrypt(sealed).decode()
        except InvalidToken:
            raise NoEncryptionKey("GATEWAY_ENCRYPTION_KEY does not decrypt a stored secret") from None

    def reseal(self, sealed: str) -> str:
        """Seals the secret with the first key. Raises NoEncryptionKey if no key opens it."""
        return self.seal(self.open(sealed))

    def find_key(self, sealed: str) -> str:
        """Returns the fingerprint of the key that opens the secret, or ''."""
        from cryptography.fernet import InvalidToken

        for fernet, fingerprint in zip(self._fernets, self.fingerprints(), strict=True):
            with suppress(InvalidToken):
                fernet.decrypt(sealed)
                return fingerprint
        return ""

    def sign(self, purpose: str, message: bytes) -> bytes:
        """Returns a signature that every process with one of the keys accepts, for this purpose only."""
        if not self._signing:
            raise NoEncryptionKey("set GATEWAY_ENCRYPTION_KEY; the service signs nothing without it")
        return _sign(self._signing[0], purpose, message)

    def is_signed(self, purpose: str, message: bytes, signature: bytes) -> bool:
        return any(hmac.compare_digest(_sign(key, purpose, message), signature) for key in self._signing)

    def fingerprints(self) -> list[str]:
        """Returns what identifies each key, in hexadecimal, without revealing it."""
        return [_sign(key, "fingerprint", b"")[:16].hex() for key in self._signing]


def _sign(key: bytes, purpose: str, message: bytes) -> bytes:
    return hmac.digest(key, purpose.encode() + b":" + message, "sha256")
