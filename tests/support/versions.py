"""Earlier versions of the service, from this repository's history."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.programs import require

ROOT = Path(__file__).parents[2]


def unpack_version(commit: str, folder: Path) -> Sequence[str]:
    """Unpacks the files of a commit to the folder. Returns the prefix of a command that runs this version."""
    git = (require("git"), "-C", ROOT)
    if subprocess.run([*git, "cat-file", "-e", commit], capture_output=True).returncode and not os.environ.get("CI"):
        pytest.skip(f"this clone has not the commit {commit}")
    archive = subprocess.run([*git, "archive", commit], capture_output=True, check=True).stdout
    subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
    prefix = ("env", f"PYTHONPATH={folder}")
    command = [*prefix, sys.executable, "-c", "import gateway; print(gateway.__file__)"]
    found = subprocess.run(command, cwd="/", capture_output=True, text=True, check=True).stdout
    assert found.startswith(str(folder)), found
    return prefix
