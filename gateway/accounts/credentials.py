"""Secret keys: random, shown once, kept as a hash."""

from __future__ import annotations

import hashlib
import secrets


def new_key(kind: str) -> str:
    """256 random bits, such as `csk_…`."""
    return f"{kind}_{secrets.token_urlsafe(32)}"


def digest(key: str) -> str:
    """A key has 256 random bits, so that a plain hash cannot be searched."""
    return hashlib.sha256(key.encode()).hexdigest()
