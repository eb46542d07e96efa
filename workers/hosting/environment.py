"""The environment variables of a release: an encrypted file in its folder, which only the worker can read and decrypt.

A start command runs without Redis, so its variables are stored with its release. They are the variables at the time of
the deploy. A rollback is a new deploy, and gets the variables of its own time. Another file has the address of the
release, which its start command sees as APP_URL.
"""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from gateway.accounts.vault import Vault

FILE, URL_FILE = "environment", "url"


def write_environment(release: Path, variables: Mapping[str, str], vault: Vault) -> None:
    """Writes the variables. Raises NoEncryptionKey."""
    path = release / FILE
    path.unlink(missing_ok=True)  # another release may share the file
    if variables:
        sealed = vault.seal(msgspec.json.encode(variables).decode())
        path.touch(mode=0o600)
        path.write_text(sealed)


def read_environment(release: Path, vault: Vault) -> dict[str, str]:
    """Reads the variables. Raises NoEncryptionKey."""
    try:
        sealed = (release / FILE).read_text()
    except FileNotFoundError:
        return {}
    return msgspec.json.decode(vault.open(sealed), type=dict[str, str])


def write_url(release: Path, url: str) -> None:
    path = release / URL_FILE
    path.unlink(missing_ok=True)  # another release may share the file
    path.write_text(url)


def read_url(release: Path) -> dict[str, str]:
    """Returns the variable APP_URL, if the address is known."""
    path = release / URL_FILE
    return {"APP_URL": path.read_text()} if path.exists() else {}
