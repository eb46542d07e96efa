"""What the worker `sites` needs before it serves apps from a cluster."""

import subprocess
import sys
from pathlib import Path

import pytest

from gateway.operations.layout import EXIT_CODE

KEY = {"GATEWAY_ENCRYPTION_KEY": "k" * 32}


@pytest.mark.parametrize(
    ("settings", "config", "said"),
    [
        # The tokens of pods would be made from nothing, and everybody could make them.
        ({}, "", "GATEWAY_ENCRYPTION_KEY: is missing"),
        (KEY, None, "No cluster is known (Configuration file "),
        (KEY, "", "No cluster is known (the file of KUBECONFIG is no kubeconfig); run this in a pod"),
        (KEY, "token: [secret", "No cluster is known (the file of KUBECONFIG is no kubeconfig); run this in a pod"),
    ],
)
def test_what_is_missing_ends_the_start_in_one_line(
    tmp_path: Path, settings: dict[str, str], config: str | None, said: str
) -> None:
    file = tmp_path / "kubeconfig"
    if config is not None:
        file.write_text(config)
    settings = settings | {"GATEWAY_APPS_ENGINE": "kubernetes", "GATEWAY_STORAGE_URL": f"file://{tmp_path}"}
    settings |= {"GATEWAY_DATA_DIR": str(tmp_path / "data"), "GATEWAY_REDIS_URL": "redis://127.0.0.1:1/0"}
    command = [sys.executable, "-m", "capsule_gateway", "worker", "sites"]
    ended = subprocess.run(
        command, env=settings | {"KUBECONFIG": str(file)}, cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == EXIT_CODE, ended.stderr
    (line,) = ended.stderr.splitlines()
    assert line.startswith(said)
