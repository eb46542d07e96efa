"""The process that packs and unpacks archives, which each deploy starts. What it does is in `test_archives.py`."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
PROGRAM = f"""\
import sys; sys.path.insert(0, {str(ROOT)!r})
import workers.hosting.archive_files
print(*(name for name in ("asyncio", "msgspec", "redis", "structlog") if name in sys.modules))
"""


def test_the_process_imports_little() -> None:
    """The modules of the worker would take most of the time of a small deploy."""
    assert subprocess.check_output([sys.executable, "-I", "-c", PROGRAM], text=True) == "\n"
