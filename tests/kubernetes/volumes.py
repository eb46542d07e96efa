"""Makes the volumes that claims ask for, as a cluster's provisioner does: each is a folder of this machine.

A folder cannot be enlarged or attached to another node, and bounds no size.
"""

import asyncio
import contextlib
import shutil
from pathlib import Path
from typing import Any

import aiohttp

from tests.kubernetes.watching import Watching

CLASS = "folders"
STORAGE_CLASS = {
    "apiVersion": "storage.k8s.io/v1",
    "kind": "StorageClass",
    "metadata": {"name": CLASS, "annotations": {"storageclass.kubernetes.io/is-default-class": "true"}},
    "provisioner": "tests/folders",
}
VOLUMES = "/api/v1/persistentvolumes"


class Volumes(Watching):
    """Provides the class `CLASS`, which is the cluster's default. `paused`: claims wait."""

    def __init__(self, server: str, token: str, folder: Path) -> None:
        super().__init__(server, token, {"claims": "/api/v1/persistentvolumeclaims", "volumes": VOLUMES})
        self.folder, self.paused = folder, False

    async def act(self) -> None:
        while True:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                for claim in list(self.objects["claims"].values()):
                    if claim["status"].get("phase") == "Pending" and not self.paused:
                        await self._make(claim)
                for (_, name), volume in list(self.objects["volumes"].items()):
                    if volume["status"].get("phase") == "Released":
                        await self.session.delete(f"{VOLUMES}/{name}")
                        shutil.rmtree(self.folder / name, ignore_errors=True)
            await asyncio.sleep(0.1)

    async def _make(self, claim: Any) -> None:
        name = f"folder-{claim['metadata']['uid']}"
        (self.folder / name).mkdir(parents=True, exist_ok=True)
        (self.folder / name).chmod(0o777)
        reference = {key: claim["metadata"][key] for key in ("name", "namespace", "uid")}
        spec = {
            "accessModes": claim["spec"]["accessModes"],
            "capacity": claim["spec"]["resources"]["requests"],
            "claimRef": {"apiVersion": "v1", "kind": "PersistentVolumeClaim", **reference},
            "hostPath": {"path": str(self.folder / name)},
            "persistentVolumeReclaimPolicy": "Retain",
            "storageClassName": claim["spec"].get("storageClassName", ""),
        }
        volume = {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name}, "spec": spec}
        async with self.session.post(VOLUMES, json=volume) as answer:
            assert answer.status in (201, 409), await answer.text()
