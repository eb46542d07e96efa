"""Describes how a client finds an API server."""

from pathlib import Path
from typing import Any

import yaml


def describe_access(cluster: dict[str, Any], token: str) -> dict[str, Any]:
    """Returns a kubeconfig of the cluster for the owner of the token."""
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": cluster}],
        "users": [{"name": "u", "user": {"token": token}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }


def write_kubeconfig(folder: Path, port: int) -> Path:
    """Returns the file for KUBECONFIG, with which a client finds a fake API server."""
    # Without TLS, no certificate is verified. To read those of all authorities costs more than most tests.
    cluster = {"server": f"http://127.0.0.1:{port}", "insecure-skip-tls-verify": True}
    file = folder / "kubeconfig"
    file.write_text(yaml.safe_dump(describe_access(cluster, "t")))
    return file
