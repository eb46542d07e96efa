"""The manifest of a release: a file in its folder, which its archive contains too.

A rollback or a promotion reads it there. The start command cannot read it, and its auth secret is encrypted.
"""

from pathlib import Path

import msgspec

from gateway.deploys.manifest import Manifest

FILE = "manifest.json"


def write_release_manifest(release: Path, manifest: Manifest | None) -> None:
    """Writes the manifest, if the source has one."""
    if manifest is not None:
        path = release / FILE
        path.touch(mode=0o600)
        path.write_bytes(msgspec.json.encode(manifest))


def read_release_manifest(release: Path) -> Manifest | None:
    """Returns the manifest, or None if the source of the release has none."""
    try:
        return msgspec.json.decode((release / FILE).read_bytes(), type=Manifest)
    except FileNotFoundError:
        return None
