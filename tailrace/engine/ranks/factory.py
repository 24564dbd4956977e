"""Makes the replicas of an engine from its configuration."""

from collections.abc import Mapping

import torch

from tailrace.config.engine import NativeEngineConfig
from tailrace.engine.collectives.base import Alone
from tailrace.engine.decoder.factory import why_torch
from tailrace.engine.model.shard import WHOLE
from tailrace.engine.ranks.base import Replica
from tailrace.engine.ranks.local import LocalReplica
from tailrace.engine.ranks.process import ProcessReplica
from tailrace.engine.ranks.rank import Rank
from tailrace.engine.ranks.rank_process import RankProcesses
from tailrace.engine.ranks.staging import StagedWeights
from tailrace.models.architecture import Architecture


def make_replicas(
    config: NativeEngineConfig, architecture: Architecture, *, device: torch.device, all_processes: RankProcesses
) -> list[Replica]:
    """Make `config.dp` replicas without weights, in rank processes of `all_processes` unless there is only one rank.

    Raises:
        ModelError: the model cannot be split into so many shards.
        ConfigError: the collectives, the kernels or the number of ranks do not suit the device.
        ConfigError: the cache cannot hold a block, or the device cannot hold the cache.
    """
    if config.ranks == 1:
        return [LocalReplica(Rank(config, architecture, WHOLE, device=device, collective=Alone()))]
    why_torch(config, architecture, config.tp, device=device)  # compiles the kernels once, before every rank would
    replicas: list[Replica] = []
    try:
        for index in range(config.dp):
            replicas.append(ProcessReplica(config, architecture, index, device=device, all_processes=all_processes))
    except BaseException:  # also when interrupted: no process may stay behind
        for replica in replicas:
            replica.close()
        raise
    return replicas


def stage(named: Mapping[str, torch.Tensor], config: NativeEngineConfig) -> Mapping[str, torch.Tensor]:
    """Put `named` where every rank can reach it. It is written once for all rank processes.

    Raises:
        EngineError: there is no room for the weights.
    """
    return named if config.ranks == 1 else StagedWeights.write(named)
