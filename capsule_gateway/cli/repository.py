"""The git repository that a folder is in, as a deploy's row shows it."""

import subprocess
from pathlib import Path
from typing import NamedTuple

GIT_SECONDS = 10.0  # of one command; the deploy then goes without
MESSAGE_LENGTH = 200  # characters


class Checkout(NamedTuple):
    """Empty for a folder in no repository, or one without a commit."""

    commit: str = ""
    branch: str = ""  # empty for a commit without a branch
    message: str = ""  # the first line of the commit's
    dirty: bool = False  # whether files in the folder differ from the commit


def read_checkout(folder: Path) -> Checkout:
    try:
        commit, _, message = _run(folder, "log", "-1", "--format=%H %s").partition(" ")
        branch = _run(folder, "branch", "--show-current")
        changes = _run(folder, "status", "--porcelain", "--", ".")
        return Checkout(commit, branch, "".join(filter(str.isprintable, message))[:MESSAGE_LENGTH], bool(changes))
    except (OSError, subprocess.SubprocessError):
        return Checkout()


def _run(folder: Path, *arguments: str) -> str:
    """Runs git, which writes nothing. Raises OSError and SubprocessError."""
    words = ["git", "--no-optional-locks", "-c", "core.fsmonitor=false", "-c", "log.showSignature=false", *arguments]
    done = subprocess.run(  # noqa: S603
        words, cwd=folder, capture_output=True, timeout=GIT_SECONDS, check=True, stdin=subprocess.DEVNULL
    )
    return done.stdout.decode(errors="replace").strip()
