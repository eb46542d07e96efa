"""The manifests, as the real kubectl builds them."""

from pathlib import Path

import pytest
import yaml

from tests.kubernetes.conftest import MANIFESTS
from tests.kubernetes.image import run
from tests.support.kustomize import build, identity

KUSTOMIZATIONS = sorted(path.parent for path in MANIFESTS.parent.glob("*/kustomization.yaml"))


@pytest.mark.parametrize("folder", KUSTOMIZATIONS, ids=lambda folder: folder.name)
def test_the_tests_build_what_kubectl_builds(folder: Path, kubectl: Path) -> None:
    built = list(yaml.safe_load_all(run(kubectl, "kustomize", folder)))
    assert sorted(built, key=identity) == sorted(build(folder), key=identity)
