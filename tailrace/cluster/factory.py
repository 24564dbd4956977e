"""Chooses how workers are run."""

from collections.abc import Mapping

from tailrace.cluster.base import Cluster
from tailrace.config.cluster import ClusterConfig, PoolConfig


def make_cluster(config: ClusterConfig, pools: Mapping[str, PoolConfig]) -> Cluster:
    """A cluster for the pools that the run needs, by their names in `config`. Ray is imported only here."""
    from tailrace.cluster.ray import RayCluster

    return RayCluster(config, pools)
