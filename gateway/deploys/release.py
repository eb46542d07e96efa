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
    health: str = ""  # the path that its start command answers with 2xx or 3xx; '' for none

    @property
    def health_path(self) -> str:
        """What is requested to find out whether the release is up."""
        return self.health or "/"

    def is_up(self, status: int) -> bool:
        """Returns whether the status of the answer shows that the release is up.

        A start command may have no page at `/`, or ask for a password there.
        """
        return status < (500 if self.runs and not self.health else 400)
