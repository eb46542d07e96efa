"""Writes the file with which a client finds a fake API server."""

from pathlib import Path
from typing import Any

import yaml


def write_kubeconfig(folder: Path, port: int) -> Path:
    """Returns the file for KUBECONFIG."""
    # Without TLS, no certificate is verified. To read those of all authorities costs more than most tests.
    cluster = {"server": f"http://127.0.0.1:{port}", "insecure-skip-tls-verify": True}
    named: dict[str, Any] = {
        "clusters": [{"name": "c", "cluster": cluster}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
    }
    file = folder / "kubeconfig"
    file.write_text(yaml.safe_dump({"apiVersion": "v1", "kind": "Config", "current-context": "x", **named}))
    return file
