"""What survives a restart of `make run`, beside the database: its keys, in a file only the user can read."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import msgspec
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from gateway.dev.children import Refusal


def _random() -> str:
    return secrets.token_urlsafe(32)


def _signing_key() -> str:
    key = ec.generate_private_key(ec.SECP256R1())
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()


class Kept(msgspec.Struct, kw_only=True):
    provider_key: str = msgspec.field(default_factory=_random)
    operator_token: str = msgspec.field(default_factory=_random)
    encryption_key: str = msgspec.field(default_factory=_random)
    signing_key: str = msgspec.field(default_factory=_signing_key)  # PEM, the demo app's, for its users' tokens
    api_key: str = ""  # the demo account's


def load(file: Path) -> Kept:
    """New keys where the file has none."""
    try:
        kept = msgspec.json.decode(file.read_bytes(), type=Kept) if file.exists() else Kept()
    except msgspec.DecodeError as error:
        raise Refusal(f"{file} is damaged ({error}). Delete {file.parent} to begin anew.") from None
    save(kept, file)
    return kept


def save(kept: Kept, file: Path) -> None:
    """In one step, so that a power cut leaves the old keys or the new ones."""
    fresh = file.with_suffix(".new")
    fresh.unlink(missing_ok=True)
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
        out.write(msgspec.json.format(msgspec.json.encode(kept)))
    fresh.replace(file)
