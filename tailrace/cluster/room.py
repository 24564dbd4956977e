"""Checks whether a cluster could ever hold the pools of a run."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from tailrace.config.cluster import PoolConfig, pool_key
from tailrace.errors import ConfigError, did_you_mean, quoted
from tailrace.host.cpu import usable_cores

Resources = Mapping[str, float]
"""Amounts of resources by Ray's names: CPU, GPU and others."""

_PARTS = 10_000
"""The parts of 1 in which Ray counts. In them 0.3 is three times 0.1, unlike in floats."""


def asked(pool: PoolConfig) -> dict[str, float]:
    """Return the resources that each worker of `pool` reserves."""
    amounts = {"CPU": pool.cpus, "GPU": pool.gpus, **pool.resources}
    return {name: amount for name, amount in amounts.items() if amount}


def check_room(
    pools: Mapping[str, PoolConfig], nodes: Sequence[Resources], datacentres: Sequence[str] | None = None
) -> None:
    """Check that `nodes`, if all free, have the resources of all `pools`, and can hold the workers of each pool alone.

    This finds pools that can never be placed. Only Ray finds out whether all pools can be placed at once. A pool that
    begins without workers may wait for machines that join later.

    `datacentres`: of each node, empty where it has no such label; by default no node has.

    Raises:
        ConfigError: the nodes do not have the resources, or cannot hold the workers of a pool.
    """
    pools = {name: pool for name, pool in pools.items() if pool.workers}
    datacentres = datacentres or [""] * len(nodes)
    for name, pool in pools.items():
        if pool.datacentre is not None:
            near = _near(name, pool, nodes, datacentres)
            try:
                check_room({name: pool.model_copy(update={"datacentre": None})}, near)
            except ConfigError as error:
                raise ConfigError(f"in the datacentre {pool.datacentre}, {error}") from None
    there_each = " or ".join(sorted({described(_ours(node, pools)) for node in nodes}))
    for name, pool in pools.items():
        if not _held(pool, nodes):
            raise ConfigError(
                f"{pool_key(name)} asks for {described(asked(pool))} for each worker, and no machine of the cluster "
                f"has that: they have {there_each}; ask for less, or join a cluster that has it{_meant(pool, nodes)}"
            )
    for kind in sorted({kind for pool in pools.values() for kind in asked(pool)}):
        shares = {name: pool.workers * asked(pool).get(kind, 0.0) for name, pool in pools.items()}
        total, there = sum(shares.values()), sum(node.get(kind, 0.0) for node in nodes)
        if _parts(total) > _parts(there):
            parts = ", ".join(f"{name} {share:g}" for name, share in shares.items() if share)
            raise ConfigError(
                f"the worker pools of `cluster` ask for {total:g} {kind} together ({parts}), and the cluster has "
                f"{there:g}; use fewer workers, ask for less, or join a larger cluster"
            )
    for name, pool in pools.items():
        if (held := _held(pool, nodes)) < pool.workers:
            raise ConfigError(
                f"{pool_key(name)} asks for {pool.workers} workers of {described(asked(pool))} each, and the "
                f"{len(nodes)} machines of the cluster hold {held}: they have {there_each}; use fewer workers, ask for "
                "less for each, or join a larger cluster"
            )


def _near(name: str, pool: PoolConfig, nodes: Sequence[Resources], datacentres: Sequence[str]) -> list[Resources]:
    """Return the nodes in the datacentre of `pool`."""
    near = [node for node, datacentre in zip(nodes, datacentres, strict=True) if datacentre == pool.datacentre]
    if not near:
        there = sorted(set(datacentres) - {""})
        raise ConfigError(
            f"{pool_key(name)}.datacentre is {quoted(pool.datacentre)}, and no machine of the cluster has that label "
            f"`datacentre`: they have {', '.join(there) or 'none'}; join machines with it, see docs/cluster.md"
            f"{did_you_mean(pool.datacentre or '', there)}"
        )
    return near


def _held(pool: PoolConfig, nodes: Sequence[Resources]) -> int:
    """Return how many workers of `pool` alone `nodes` can hold. If they reserve nothing, each node holds all."""
    each = asked(pool)
    return sum(
        min((_parts(node.get(kind, 0.0)) // _parts(each[kind]) for kind in each), default=pool.workers)
        for node in nodes
    )


def _parts(amount: float) -> int:
    return round(amount * _PARTS)


def check_this_machine(pools: Mapping[str, PoolConfig], *, gpus: int) -> None:
    """Check that this machine can hold `pools` and has their cores, before a Ray is started on it.

    `gpus`: the number of its GPUs. See `check_room`.

    Raises:
        ConfigError: the machine does not run Linux, or does not have the resources or cores of `pools`.
    """
    if sys.platform != "linux":
        raise ConfigError(
            f"pipeline.placement is 'separated', and worker processes need Linux; this machine has {sys.platform}: "
            "use pipeline.placement=colocated"
        )
    memory = float(psutil.virtual_memory().total)
    check_room(pools, [{"CPU": float(_cpus()), "GPU": float(gpus), "memory": memory}])
    there = usable_cores()
    for name, pool in pools.items():
        if missing := set(pool.cores or ()).difference(there):
            raise ConfigError(
                f"{pool_key(name)}.cores {sorted(missing)} cannot be had on this machine, which has {there}"
            )


def _cpus() -> int:
    """Return the number of CPUs of the machine, or of those that the container may use."""
    count = os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="utf-8").split()
    except OSError:
        return count
    return count if quota == "max" else min(count, max(1, int(quota) // int(period)))


def described(amounts: Resources) -> str:
    """Return amounts as text, such as `2 CPU, 1 GPU`."""
    return ", ".join(f"{amount:g} {name}" for name, amount in sorted(amounts.items())) or "nothing"


def _ours(node: Resources, pools: Mapping[str, PoolConfig]) -> dict[str, float]:
    """Return the resources of `node` that any of `pools` asks for."""
    kinds = {kind for pool in pools.values() for kind in asked(pool)}
    return {kind: node.get(kind, 0.0) for kind in kinds}


def _meant(pool: PoolConfig, nodes: Sequence[Resources]) -> str:
    known = {kind for node in nodes for kind in node}
    return next((did_you_mean(kind, known) for kind in pool.resources if kind not in known), "")
