"""A cluster for tests that restore it."""

from collections.abc import Iterator

import pytest

from tests.support.redis_servers import ReplicatedCluster, replicated_cluster


@pytest.fixture(scope="package")
def running_cluster() -> Iterator[ReplicatedCluster]:
    """tests/gateway/test_app_cluster.py runs on one of Redis's servers, too."""
    with replicated_cluster() as running:
        yield running


@pytest.fixture
def cluster(running_cluster: ReplicatedCluster) -> Iterator[ReplicatedCluster]:
    """The cluster, whose keys are removed afterwards."""
    yield running_cluster
    for node in running_cluster.primaries:
        with node.client() as client:
            client.flushall()
