"""Builds a kustomization, with the fields that ops/kubernetes uses. Any other field is an error."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

Document = dict[str, Any]

FIELDS = {"apiVersion", "kind", "namespace", "resources", "images", "patches"}
CLUSTER_WIDE = {"Namespace", "RuntimeClass", "GatewayClass"}
# Lists whose entries are merged by this field; other lists are replaced.
MERGED_BY = {"containers": "name", "env": "name", "volumes": "name", "volumeMounts": "mountPath", "ports": "port"}


def build(folder: Path) -> list[Document]:
    [kustomization] = load(folder / "kustomization.yaml")
    assert set(kustomization) <= FIELDS, f"{folder}: {set(kustomization) - FIELDS}"
    documents = [document for name in kustomization["resources"] for document in load(folder / name)]
    for document in documents:
        if (namespace := kustomization.get("namespace")) and document["kind"] not in CLUSTER_WIDE:
            document["metadata"]["namespace"] = namespace
    for patch in kustomization.get("patches", []):
        for change in load(folder / patch["path"]):
            (target,) = [document for document in documents if identity(document) == identity(change)]
            merge(target, change)
    for image in kustomization.get("images", []):
        for container in (container for document in documents for container in containers(document)):
            if re.sub(r":[\w.-]+$", "", container["image"]) == image["name"]:
                container["image"] = f"{image['newName']}:{image['newTag']}"
    names = [identity(document) for document in documents]
    assert len(names) == len(set(names)), f"{folder}: a name occurs twice"
    return documents


def load(path: Path) -> list[Document]:
    return build(path) if path.is_dir() else list(yaml.load_all(path.read_text(), yaml.CSafeLoader))


def identity(document: Document) -> tuple[str, str, str]:
    metadata = document["metadata"]
    return document["kind"], metadata.get("namespace", ""), metadata["name"]


def containers(document: Document) -> Iterator[Document]:
    spec = document.get("spec", {})
    spec = spec.get("jobTemplate", {}).get("spec", spec)  # of a CronJob
    yield from spec.get("template", {}).get("spec", {}).get("containers", [])


def merge(into: Document, change: Document) -> None:
    for key, value in change.items():
        present = into.get(key)
        if value is None:
            into.pop(key, None)
        elif isinstance(value, dict) and isinstance(present, dict):
            merge(present, value)
        elif isinstance(value, list) and isinstance(present, list) and key in MERGED_BY and isinstance(value[0], dict):
            for entry in value:
                same = [old for old in present if old[MERGED_BY[key]] == entry[MERGED_BY[key]]]
                merge(same[0], entry) if same else present.append(entry)
        else:
            into[key] = value
