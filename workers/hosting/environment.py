"""The environment variables of a release: a sealed file in its folder, which only the worker can read and open.

A start command runs without Redis, so its variables are kept with its release. They are those of the release's deploy;
a rollback is a deploy of its own, with the variables of its time.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from gateway.accounts.vault import Vault

FILE = "environment"


def write_environment(release: Path, variables: Mapping[str, str], vault: Vault) -> None:
    """Raises NoEncryptionKey."""
    path = release / FILE
    path.unlink(missing_ok=True)  # it may be shared with the release that this one serves again
    if variables:
        sealed = vault.seal(msgspec.json.encode(variables).decode())
        path.touch(mode=0o600)
        path.write_text(sealed)


def read_environment(release: Path, vault: Vault) -> dict[str, str]:
    """Raises NoEncryptionKey."""
    try:
        sealed = (release / FILE).read_text()
    except FileNotFoundError:
        return {}
    return msgspec.json.decode(vault.open(sealed), type=dict[str, str])
