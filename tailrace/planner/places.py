"""Where the workers of a recipe stand: each of its pools on one pool of the cluster.

    what decides      in the recipe                                        in the cluster
    the name          `trainer`, `rollout`, or NAME of its further pools   the name of a pool
    else the place    datacentre                                           datacentre
    and the device    a resource that is called after it                   device

Of several that will do, none counts that is called after another pool of the recipe. The last one of those trains, and
engines stand on another one. A plan chooses the pools itself, but for those that are called `rollout` or `trainer`.
"""

from collections.abc import Iterable, Sequence

from tailrace.config.cluster import ROLLOUT, ClusterConfig, PoolConfig, pool_key
from tailrace.errors import PlanError
from tailrace.planning.hardware.base import Cluster, Pool
from tailrace.planning.hardware.catalogue import device_called, plain_name

_TRAINER = "trainer"


def trainer_place(cluster: Cluster, config: ClusterConfig) -> Pool:
    """Return the pool that trains.

    Raises:
        PlanError: none has what the recipe asks for.
    """
    return _unclaimed(_fitting(cluster, _TRAINER, config.trainer), _TRAINER, config)[-1]


def rollout_place(cluster: Cluster, name: str, config: ClusterConfig, trainer: Pool) -> Pool:
    """Return the pool that the engines of a recipe's pool stand on. `trainer`: the one that trains.

    Raises:
        PlanError: none has what the recipe asks for, or several have.
    """
    fitting = _fitting(cluster, name, config.rollout.each[name])
    found = _unclaimed([pool for pool in fitting if pool is not trainer] or fitting, name, config)
    if len(found) > 1:
        raise PlanError(
            f"{pool_key(name)} may stand on {_listed(found, ' or ')} of the cluster; call one of them "
            f"{_last_part(name)!r} in the cluster file, or give the key a datacentre or a resource that only one has"
        )
    return found[0]


def planned_places(cluster: Cluster) -> tuple[Sequence[Pool], Sequence[Pool]]:
    """Return the pools that a plan may generate on, and those that it may train on.

    Where one is called `rollout`, a plan generates on it alone, and trains on others; likewise for `trainer`.
    """

    def places(name: str, other: str) -> Sequence[Pool]:
        own = [pool for pool in cluster.pools if _is_called(pool, name)]
        return own or [pool for pool in cluster.pools if not _is_called(pool, other)] or cluster.pools

    return places(ROLLOUT, _TRAINER), places(_TRAINER, ROLLOUT)


def _fitting(cluster: Cluster, name: str, config: PoolConfig) -> list[Pool]:
    """The pools that have what the recipe asks for; of one that has the name, only that."""
    kinds = _kinds(cluster, config.resources)
    every = [pool for pool in cluster.pools if _is_called(pool, name)] or list(cluster.pools)
    found = [
        pool for pool in every if config.datacentre in (None, pool.datacentre) and (not kinds or pool.kind in kinds)
    ]
    if not found:
        asked = [f"the datacentre {config.datacentre!r}"] if config.datacentre else []
        asked += [f"the device {kind}" for kind in sorted(kinds)]
        raise PlanError(
            f"{pool_key(name)} asks for {' and '.join(asked)}, and the cluster has {_listed(every, ', ')}; change the "
            "one or the other"
        )
    return found


def _kinds(cluster: Cluster, resources: Iterable[str]) -> set[str]:
    """The kinds of devices that resources are called after."""
    own = {pool.kind: pool.device for pool in cluster.pools}
    return {found[0] for found in (device_called(name, own) for name in resources) if found is not None}


def _unclaimed(pools: Sequence[Pool], name: str, config: ClusterConfig) -> Sequence[Pool]:
    """The pools that are not called after another pool of the recipe; all of them where there are no such ones."""
    others = {_TRAINER, *config.rollout.each} - {name}
    return [pool for pool in pools if not any(_is_called(pool, other) for other in others)] or pools


def _is_called(pool: Pool, name: str) -> bool:
    """Whether a pool of the cluster has the name of a recipe's pool."""
    return plain_name(pool.name) == plain_name(_last_part(name))


def _last_part(name: str) -> str:
    return name.rpartition(".")[2]


def _listed(pools: Iterable[Pool], between: str) -> str:
    """Pools with their devices and places."""
    return between.join(
        pool.name
        + (f" of {pool.kind}" if pool.name != pool.kind else "")
        + (f" in {pool.datacentre!r}" if pool.datacentre else "")
        for pool in pools
    )
