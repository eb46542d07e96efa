"""The files of a release that its start command cannot read: its environment variables, its address, its manifest.

A start command runs without Redis, so its variables are stored with its release, encrypted for the worker alone. They
are the variables at the time of the deploy. A rollback is a new deploy, and gets the variables of its own time. The
address is what the start command sees as APP_URL.

The manifest is in the release's archive too. A rollback or a promotion reads it there. Its auth secret is encrypted.
"""

from pathlib import Path

import msgspec

from gateway.accounts.vault import Vault
from gateway.deploys.manifest import Manifest

MANIFEST_FILE = "manifest.json"


def write_release_manifest(release: Path, manifest: Manifest | None) -> None:
    """Writes the manifest, if the source has one."""
    if manifest is not None:
        path = release / MANIFEST_FILE
        path.touch(mode=0o600)
        path.write_bytes(msgspec.json.encode(manifest))


def read_release_manifest(release: Path) -> Manifest | None:
    """Returns the manifest, or None if the source of the release has none."""
    try:
        return msgspec.json.decode((release / MANIFEST_FILE).read_bytes(), type=Manifest)
    except FileNotFoundError:
        return None


ENVIRONMENT_FILE, URL_FILE = "environment", "url"


def write_environment(release: Path, sealed: str) -> None:
    """Writes the encrypted variables; an empty text stands for none."""
    path = release / ENVIRONMENT_FILE
    path.unlink(missing_ok=True)  # another release may share the file
    if sealed:
        path.touch(mode=0o600)
        path.write_text(sealed)


def read_environment(release: Path, vault: Vault) -> dict[str, str]:
    """Reads the variables. Raises NoEncryptionKey."""
    try:
        sealed = (release / ENVIRONMENT_FILE).read_text()
    except FileNotFoundError:
        return {}
    return msgspec.json.decode(vault.open(sealed), type=dict[str, str])


def write_url(release: Path, url: str) -> None:
    if read_url(release) != {"APP_URL": url}:
        path = release / URL_FILE
        path.unlink(missing_ok=True)  # another release may share the file
        path.write_text(url)


def read_url(release: Path) -> dict[str, str]:
    """Returns the variable APP_URL, if the address is known."""
    path = release / URL_FILE
    return {"APP_URL": path.read_text()} if path.exists() else {}
