"""One Ray cluster for all tests of this directory."""

from collections.abc import AsyncIterator

import pytest

from tailrace.cluster.base import Cluster, WorkerSpec
from tailrace.cluster.local import LocalCluster
from tailrace.cluster.ray import RayCluster
from tailrace.config.cluster import ClusterConfig, PoolConfig

POOL = PoolConfig(cpus=0.0)
CONFIG = ClusterConfig(start_limit_s=60.0, heartbeat_limit_s=20.0)


@pytest.fixture(scope="session")
def ray_connection(connected_to_ray: None) -> None:
    """Connect this process to a Ray of its own."""


@pytest.fixture(params=["local", "ray"])
async def cluster(request: pytest.FixtureRequest) -> AsyncIterator[Cluster]:
    """A cluster of each implementation in turn."""
    if request.param == "ray":
        request.getfixturevalue("ray_connection")
    made = RayCluster(CONFIG, {"rollout": POOL}) if request.param == "ray" else LocalCluster(CONFIG)
    async with made:
        yield made


@pytest.fixture
async def ray_cluster(ray_connection: None) -> AsyncIterator[RayCluster]:
    """A cluster of workers on Ray."""
    async with RayCluster(CONFIG, {"rollout": POOL}) as made:
        yield made


def servant(name: str = "rollout-0", *, kind: str = "Servant", pool: PoolConfig = POOL) -> WorkerSpec:
    """A worker of tests/cluster/workers.py."""
    return WorkerSpec(name=name, pool=pool, factory=f"tests.cluster.workers:{kind}", settings=b"settings")
