"""Temporary folders, and what stays of them when a process is killed."""

import subprocess
import sys
from pathlib import Path

from gateway.operations.temporary import temporary_folder

HOLD = """
import sys
from pathlib import Path
from gateway.operations.temporary import temporary_folder
with temporary_folder(Path(sys.argv[1]), "work-") as folder:
    (folder / "secret").write_text("x")
    print(folder, flush=True)
    sys.stdin.read()
"""


def test_it_is_removed_with_its_files(tmp_path: Path) -> None:
    with temporary_folder(tmp_path, "work-") as folder:
        (folder / "inner").mkdir()
        assert folder.parent == tmp_path
        assert folder.stat().st_mode & 0o777 == 0o700
    assert not [*tmp_path.iterdir()]


def test_what_a_killed_process_has_left(tmp_path: Path) -> None:
    """A live process keeps its folder."""
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        left = Path(process.stdout.readline().strip())
        with temporary_folder(tmp_path, "work-"):
            assert (left / "secret").exists()
        process.kill()
        process.wait()
    assert (left / "secret").exists()
    with temporary_folder(tmp_path, "other-"):
        assert left.exists()
    with temporary_folder(tmp_path, "work-"):
        assert not left.exists()
