"""What the worker `sites` needs before it serves apps from a cluster."""

import subprocess
import sys
from pathlib import Path

from gateway.operations.layout import EXIT_CODE


def test_without_an_encryption_key_nothing_starts(tmp_path: Path) -> None:
    """The tokens of pods would be made from nothing, and everybody could make them."""
    settings = {"GATEWAY_APPS_ENGINE": "kubernetes", "GATEWAY_STORAGE_URL": f"file://{tmp_path}"}
    settings |= {"GATEWAY_DATA_DIR": str(tmp_path / "data"), "GATEWAY_REDIS_URL": "redis://127.0.0.1:1/0"}
    command = [sys.executable, "-m", "capsule_gateway", "worker", "sites"]
    ended = subprocess.run(command, env=settings, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert ended.returncode == EXIT_CODE
    assert ended.stderr.startswith("GATEWAY_ENCRYPTION_KEY: is missing")
