"""The manifests are as the real kubectl builds them, and their roles allow what the service does, and no more.

Runs after all other tests of the folder.
"""

from pathlib import Path

import pytest
import yaml

from tests.kubernetes.cluster import OwnCluster
from tests.kubernetes.conftest import MANIFESTS
from tests.kubernetes.image import run
from tests.support.deployment import Host
from tests.support.kustomize import build, identity

KUSTOMIZATIONS = sorted(path.parent for path in MANIFESTS.parent.glob("*/kustomization.yaml"))


@pytest.mark.parametrize("folder", KUSTOMIZATIONS, ids=lambda folder: folder.name)
def test_the_tests_build_what_kubectl_builds(folder: Path, kubectl: Path) -> None:
    built = list(yaml.safe_load_all(run(kubectl, "kustomize", folder)))
    assert sorted(built, key=identity) == sorted(build(folder), key=identity)


@pytest.mark.parametrize("account", ["sites", "gateway"])
def test_a_role_allows_exactly_what_is_used(running: Host, cluster: OwnCluster, account: str) -> None:
    [role] = [each for each in build(MANIFESTS) if (each["kind"], each["metadata"]["name"]) == ("Role", account)]
    allowed = {(verb, resource) for rule in role["rules"] for resource in rule["resources"] for verb in rule["verbs"]}
    requests = cluster.read_requests(account)
    # An API server that has just started refuses what it allows a moment later.
    used, served = ({(verb, what) for verb, what, code in requests if code < most} for most in (600, 400))
    refused = {(verb, resource) for verb, resource, code in requests if code == 403}
    assert refused <= served
    assert used <= allowed
    # Newer versions also ask for this right when what is applied does not exist.
    assert {(verb, resource) for verb, resource in allowed - used if verb != "create"} == set()
