"""Writes the file with which a client finds a fake API server."""

from pathlib import Path
from typing import Any

import yaml


def write_kubeconfig(folder: Path, port: int) -> Path:
    """Returns the file for KUBECONFIG."""
    named: dict[str, Any] = {
        "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
    }
    file = folder / "kubeconfig"
    file.write_text(yaml.safe_dump({"apiVersion": "v1", "kind": "Config", "current-context": "x", **named}))
    return file
