"""Chooses the cluster that runs the workers."""

import sys
from collections.abc import Mapping

from tailrace.cluster.base import Cluster
from tailrace.config.cluster import ClusterConfig, PoolConfig
from tailrace.transfer.weights.segments import check_shared_memory


def make_cluster(config: ClusterConfig, pools: Mapping[str, PoolConfig]) -> Cluster:
    """Return a cluster for the pools that the run needs, by their names in `config`.

    If this process is connected to Ray already, the cluster is that Ray. Only then is Ray imported here.

    Raises:
        ConfigError: the workers would run on this machine, and it has no shared memory for them.
    """
    if config.address is None:
        check_shared_memory()
    if (ray := sys.modules.get("ray")) is not None and ray.is_initialized():
        from tailrace.cluster.ray import RayCluster

        return RayCluster(config, pools)
    from tailrace.cluster.ray_process import RayProcess

    return RayProcess(config, pools)
