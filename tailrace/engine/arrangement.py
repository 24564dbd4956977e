"""The current arrangement of an engine's ranks: a lane for each replica. The arrangement can change.

A switch moves weights, caches and sequences between the existing ranks (`adaptive_tp`). Where it fails halfway, all
ranks are made again in the former arrangement. The sequences, whose tokens are kept here, are computed again.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import repeat
from typing import Literal

import torch

from tailrace.config.engine import NativeEngineConfig
from tailrace.engine.collectives.factory import resolve_collectives
from tailrace.engine.decoder.factory import local_sizes, rank_bytes
from tailrace.engine.lane import Lane
from tailrace.engine.profile import StepTimes
from tailrace.engine.ranks.base import RankDied
from tailrace.engine.ranks.factory import make_replicas
from tailrace.engine.ranks.process import ProcessReplica
from tailrace.engine.ranks.rank_process import RankProcesses
from tailrace.engine.ranks.reshard import switch_bytes
from tailrace.engine.ranks.switch import SwitchExecutor, SwitchRefused
from tailrace.engine.scheduling.blocks import BlockManager
from tailrace.engine.scheduling.migration import Migration
from tailrace.engine.scheduling.scheduler import Counts, Scheduler
from tailrace.engine.scheduling.transplant import Transplant, plan_transplant
from tailrace.errors import EngineError, TailraceError
from tailrace.host.stopwatch import Stopwatch
from tailrace.models.architecture import Architecture
from tailrace.planning.replicas import Dispatcher
from tailrace.planning.tp_verdict import SwitchReport

MAX_FAILURES = 3
"""Switches in a row that may fail halfway. Beyond that, the cause is not chance."""


class SwitchFailed(EngineError):
    """A switch failed halfway. The ranks were made again in the former arrangement."""


class Arrangement:
    """DP × TP ranks, without weights until `load`. Not thread-safe, except for `interrupt`."""

    def __init__(self, config: NativeEngineConfig, architecture: Architecture, *, device: torch.device) -> None:
        """Start the ranks.

        Raises:
            ModelError, ConfigError, EngineError: see `EngineCore`.
        """
        self.config = config
        """The configuration, with the current dp and tp."""
        self.counts = Counts()
        self.stopwatch = Stopwatch()
        """The time of all steps, by part."""
        self._architecture = architecture
        self._device = device
        self._all_processes = RankProcesses()
        self._executor = SwitchExecutor(resolve_collectives(config, device) if config.adaptive_tp else config)
        self._failures = 0
        schedulers = self._schedulers(config)  # before any process is started: there may be no room
        replicas = make_replicas(config, architecture, device=device, all_processes=self._all_processes)
        self.lanes = list(map(Lane, schedulers, replicas, repeat(self._times(config))))
        """The lanes, one for each current replica."""
        self.dispatcher = Dispatcher(schedulers)
        self._sizes = rank_bytes(config, architecture, device=device)
        self._most_used = 0
        """Bytes of cache that earlier arrangements have used at most since `memory` was last called."""

    @property
    def can_switch(self) -> bool:
        """Whether a switch may be tried; False once switches have failed too often."""
        return self._failures < MAX_FAILURES

    @property
    def unfinished(self) -> int:
        """Sequences that run or wait."""
        return sum(lane.scheduler.running + lane.scheduler.waiting for lane in self.lanes)

    @property
    def groups(self) -> frozenset[int]:
        """Degrees whose communication groups exist."""
        return self._executor.groups(self._replicas(), self.config.tp)

    def least_blocks(self, degrees: Iterable[int]) -> int:
        """The fewest blocks of a replica's cache, with the current degree or any of `degrees`.

        Raises:
            ModelError, ConfigError, EngineError: the model or the cache does not allow one of them.
        """
        return min(_blocks(self.config, self._architecture, tp) for tp in {self.config.tp, *degrees})

    def cache_tokens(self, tp: int) -> int:
        """The tokens that a replica's cache has room for under a degree.

        Raises:
            ModelError, ConfigError, EngineError: the model or the cache does not allow it.
        """
        return _blocks(self.config, self._architecture, tp) * self.config.block_size

    def load(self, named: Mapping[str, torch.Tensor], *, recompute: bool) -> None:
        """Replace the weights of all ranks by these full, checked tensors. No step may be under way.

        Raises:
            EngineError: ranks died repeatedly, or a device ran out of memory.
        """
        for lane in self.lanes:
            lane.load(named)
        for lane in self.lanes:
            lane.loaded(recompute=recompute)

    def switch(self, tp: int, *, cache: Literal["move", "recompute"]) -> SwitchReport:
        """Arrange the ranks as replicas of `tp` each. No step may be under way, and the weights must be whole.

        Args:
            tp: The new degree, which divides the number of ranks.
            cache: Whether the cache of unfinished sequences moves or is computed again.

        Raises:
            SwitchRefused: there is no room for the switch; everything is as it was.
            SwitchFailed: the switch broke off; the ranks were made again, and no sequence lost a token.
            EngineError: the ranks could not be made again either.
        """
        assert not any(lane.busy for lane in self.lanes), "ranks are rearranged between two steps"
        began = time.perf_counter()
        source, target = self.config, self.config.model_copy(update={"dp": self.config.ranks // tp, "tp": tp})
        old, new = [lane.scheduler for lane in self.lanes], self._schedulers(target)
        plan = plan_transplant(old, new, source_tp=source.tp, target_tp=tp, move=cache == "move")
        try:
            report = self._move(plan, target)
        except SwitchRefused:
            raise
        except TailraceError as error:
            self._failures += 1
            self._start_over(RankDied(str(error)))
            raise SwitchFailed(f"the switch from TP {source.tp} to TP {tp} failed: {error}") from error
        self._failures = 0
        self.counts.switches += 1
        dispatcher = Dispatcher(new)
        plan.commit(old, dispatcher.choose)  # before the lanes change, so that none is ever seen without its sequences
        self._adopt(target, new, dispatcher)
        return replace(report, total_s=time.perf_counter() - began)

    def memory(self) -> dict[str, int]:
        """See `Engine.memory`; of all ranks together."""
        ranks, sizes = self.config.ranks, self._sizes
        used, self._most_used = max(self._most_used, self._take_most_used()), 0
        cache = ranks * sizes.cache
        return {"weights": ranks * sizes.weights, "kv_cache_used": used, "kv_cache_free": max(0, cache - used)}

    def _take_most_used(self) -> int:
        """Bytes of cache that the lanes have used at most since the last call, on all ranks."""
        return self.config.tp * self._sizes.block * sum(lane.take_most_blocks() for lane in self.lanes)

    def interrupt(self) -> None:
        """End worker processes, and the wait for their work. Callable from any thread; only `close` may follow."""
        self._all_processes.interrupt()

    def close(self) -> None:
        """End the ranks. Closing twice is harmless."""
        for lane in self.lanes:
            lane.replica.close()
        self._all_processes.close()  # those between two arrangements, too

    def _move(self, plan: Transplant, target: NativeEngineConfig) -> SwitchReport:
        source, replicas = self.config, self._replicas()
        near, *across = (max(map(_most_blocks, moves)) for moves in zip(*plan.migrations, strict=True))
        extra = switch_bytes(self._architecture, source, target.tp, near, sum(across))
        self._executor.check(replicas, extra)
        return self._executor.move(replicas, plan.migrations, tp=source.tp, target_tp=target.tp)

    def _adopt(
        self, target: NativeEngineConfig, schedulers: Sequence[Scheduler], dispatcher: Dispatcher[Scheduler]
    ) -> None:
        """Make the target's replicas of the existing processes."""
        self._most_used = max(self._most_used, self._take_most_used())
        weights = self._replicas()[0].weights
        processes = [process for replica in self._replicas() for process in replica.release()]
        lanes = [
            Lane(
                scheduler,
                ProcessReplica(
                    target,
                    self._architecture,
                    index,
                    device=self._device,
                    all_processes=self._all_processes,
                    processes=processes[index * target.tp : (index + 1) * target.tp],
                    weights=weights,
                ),
                self._times(target),
            )
            for index, scheduler in enumerate(schedulers)
        ]
        for lane in lanes:
            lane.profiler = self.lanes[0].profiler
        self.config, self.lanes, self.dispatcher = target, lanes, dispatcher
        self._sizes = rank_bytes(target, self._architecture, device=self._device)

    def _start_over(self, cause: RankDied) -> None:
        """Start new processes in the current arrangement."""
        self.close()
        for lane in self.lanes:
            lane.restart(cause)

    def _times(self, config: NativeEngineConfig) -> StepTimes:
        return StepTimes(stopwatch=self.stopwatch, tp=config.tp, has_queue=self._device.type != "cpu")

    def _schedulers(self, config: NativeEngineConfig) -> list[Scheduler]:
        """Make a scheduler without sequences for each replica."""
        blocks = _blocks(config, self._architecture, config.tp)
        return [
            Scheduler(
                BlockManager(blocks, config.block_size),
                max_batch_size=config.max_batch_size,
                prefill_tokens=config.prefill_tokens,
                counts=self.counts,
            )
            for _ in range(config.dp)
        ]

    def _replicas(self) -> list[ProcessReplica]:
        replicas = [lane.replica for lane in self.lanes if isinstance(lane.replica, ProcessReplica)]
        assert len(replicas) == len(self.lanes), "a rank without a worker process has nothing to be rearranged with"
        return replicas


def _most_blocks(migration: Migration) -> int:
    """The blocks that move from the old replica that has most of them."""
    return max(map(len, migration.sources))


def _blocks(config: NativeEngineConfig, architecture: Architecture, tp: int) -> int:
    """The blocks of a replica's cache under degree `tp`."""
    _, blocks = local_sizes(config, architecture, tp)
    return blocks
