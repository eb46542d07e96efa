"""What hosts and pods must know of a release to serve it. Imports little, because each pod starts with this."""

import msgspec


class ReleaseArchive(msgspec.Struct, frozen=True):
    digest: str  # SHA-256 of the archive, hexadecimal
    size: int  # of the archive, bytes


class Release(ReleaseArchive, frozen=True):
    """An archive, and the other data that a host needs to serve it."""

    runs: bool = False  # whether it has a start command
    environment: str = ""  # of its start command, encrypted
    manifest: str = ""  # JSON; builders read it here, and hosts in the archive
