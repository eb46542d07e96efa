"""Random keys, such as API keys. Each is shown once and stored as a hash."""

import hashlib
import secrets


def new_key(prefix: str) -> str:
    """Returns 256 random bits after the prefix, such as `csk_…`."""
    return f"{prefix}_{secrets.token_urlsafe(32)}"


def digest(key: str) -> str:
    """Returns the SHA-256 of a key. A plain hash is enough: nobody can search through 256 random bits."""
    return hashlib.sha256(key.encode()).hexdigest()
