"""The keys of `capsule dev`, kept across restarts in a file that only the user can read."""

import os
import secrets
from pathlib import Path

import msgspec

from capsule_gateway.dev.children import StartFailed


def _new_token() -> str:
    return secrets.token_urlsafe(32)


class Keys(msgspec.Struct, kw_only=True):
    provider_key: str = msgspec.field(default_factory=_new_token)
    operator_token: str = msgspec.field(default_factory=_new_token)
    encryption_key: str = msgspec.field(default_factory=_new_token)
    auth_secret: str = msgspec.field(default_factory=_new_token)  # signs tokens while the demo app has no backend
    session_secret: str = msgspec.field(default_factory=_new_token)  # BETTER_AUTH_SECRET of the developer's own app
    oidc_secret: str = msgspec.field(default_factory=_new_token)  # of the gateway, at the provider for sign-in
    password: str = msgspec.field(default_factory=_new_token)  # of the demo app's user
    demo: str = ""  # the digest of the template that was deployed as the demo app
    api_key: str = ""  # of the demo account


def load(file: Path) -> Keys:
    """Returns the keys, after creating and saving those that the file lacks. Raises StartFailed."""
    try:
        keys = msgspec.json.decode(file.read_bytes(), type=Keys) if file.exists() else Keys()
    except msgspec.DecodeError as error:
        raise StartFailed(f"{file} is damaged ({error}). Delete {file.parent} to start over.") from None
    save(keys, file)
    return keys


def save(keys: Keys, file: Path) -> None:
    replace_file(file, msgspec.json.format(msgspec.json.encode(keys)))


def replace_file(file: Path, content: bytes) -> None:
    """Replaces a file that only the user can read, in one step, so that a crash leaves the old one or the new one."""
    temporary = file.with_suffix(".new")
    temporary.unlink(missing_ok=True)
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
        out.write(content)
    temporary.replace(file)
