"""The ranks of an engine as they are arranged now: a lane for each replica. The arrangement can change.

A switch moves weights, caches and sequences between the ranks that there are (`adaptive_tp`). Where it fails halfway,
all ranks are made anew as they were arranged before, and the sequences, whose tokens are kept here, are computed again.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

import torch

from tailrace.config.engine import NativeEngineConfig
from tailrace.engine.collectives.factory import resolve_collectives
from tailrace.engine.decoder.factory import local_sizes
from tailrace.engine.lane import Lane
from tailrace.engine.ranks.base import RankDied
from tailrace.engine.ranks.factory import make_replicas
from tailrace.engine.ranks.process import ProcessReplica
from tailrace.engine.ranks.rank_process import RankProcesses
from tailrace.engine.ranks.reshard import switch_bytes
from tailrace.engine.ranks.switch import SwitchExecutor, SwitchRefused, SwitchReport
from tailrace.engine.scheduling.blocks import BlockManager
from tailrace.engine.scheduling.dispatch import Dispatcher
from tailrace.engine.scheduling.scheduler import Counts, Scheduler
from tailrace.engine.scheduling.transplant import Transplant, plan_transplant
from tailrace.errors import EngineError, TailraceError
from tailrace.models.architecture import Architecture

MAX_FAILURES = 3
"""Switches in a row that may fail halfway: what makes them fail is not chance then."""


class SwitchFailed(EngineError):
    """The ranks were made anew, arranged as before."""


class Arrangement:
    """DP × TP ranks, without weights until `load`. Not thread-safe, but for `interrupt`."""

    def __init__(self, config: NativeEngineConfig, architecture: Architecture, *, device: torch.device) -> None:
        """Start the ranks.

        Raises:
            ModelError, ConfigError, EngineError: see `EngineCore`.
        """
        self.config = config
        """With dp and tp as they are now."""
        self.counts = Counts()
        self._architecture = architecture
        self._device = device
        self._all_processes = RankProcesses()
        self._executor = SwitchExecutor(resolve_collectives(config, device) if config.adaptive_tp else config)
        self._failures = 0
        schedulers = self._schedulers(config)  # before any process is started: there may be no room
        replicas = make_replicas(config, architecture, device=device, all_processes=self._all_processes)
        self.lanes = list(map(Lane, schedulers, replicas))
        """One for each replica that there is now."""
        self.dispatcher = Dispatcher(schedulers)

    @property
    def can_switch(self) -> bool:
        """False once switches have failed too often."""
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
        """Of a replica's cache, now or with any of these degrees.

        Raises:
            ModelError, ConfigError, EngineError: the model or the cache does not allow one of them.
        """
        return min(_blocks(self.config, self._architecture, tp) for tp in {self.config.tp, *degrees})

    def load(self, named: Mapping[str, torch.Tensor], *, recompute: bool) -> None:
        """Replace the weights of all ranks by these full, checked tensors. No step is under way.

        Raises:
            EngineError: ranks died repeatedly, or a device ran out of memory.
        """
        for lane in self.lanes:
            lane.load(named)
        for lane in self.lanes:
            lane.loaded(recompute=recompute)

    def switch(self, tp: int, *, cache: Literal["move", "recompute"]) -> SwitchReport:
        """Arrange the ranks as replicas of `tp` each. No step is under way; the weights are whole.

        Args:
            tp: Divides the number of ranks.
            cache: What becomes of the cache of unfinished sequences.

        Raises:
            SwitchRefused: there is no room for it; everything is as it was.
            SwitchFailed: it broke off; the ranks were made anew, no sequence lost a token.
            EngineError: the ranks could not be made anew either.
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

    def interrupt(self) -> None:
        """From any thread: end worker processes, and with them the wait for what is under way. Only `close` follows."""
        self._all_processes.interrupt()

    def close(self) -> None:
        """End the ranks. Closing twice is harmless."""
        for lane in self.lanes:
            lane.replica.close()
        self._all_processes.close()  # those between two arrangements, too

    def _move(self, plan: Transplant, target: NativeEngineConfig) -> SwitchReport:
        source, replicas = self.config, self._replicas()
        moving = [len(blocks) for migration in plan.migrations for blocks in migration.sources]
        extra = switch_bytes(self._architecture, source, target.tp, max(moving, default=0))
        self._executor.check(replicas, extra)
        return self._executor.move(replicas, plan.migrations, tp=source.tp, target_tp=target.tp)

    def _adopt(self, target: NativeEngineConfig, schedulers: Sequence[Scheduler], dispatcher: Dispatcher) -> None:
        """Make the target's replicas of the processes that there are."""
        weights = self._replicas()[0].weights
        processes = [process for replica in self._replicas() for process in replica.release()]
        self.config = target
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
            )
            for index, scheduler in enumerate(schedulers)
        ]
        for lane in lanes:
            lane.profiler = self.lanes[0].profiler
        self.lanes, self.dispatcher = lanes, dispatcher

    def _start_over(self, cause: RankDied) -> None:
        """New processes in the arrangement that there is."""
        self.close()
        for lane in self.lanes:
            lane.restart(cause)

    def _schedulers(self, config: NativeEngineConfig) -> list[Scheduler]:
        """Without a sequence, one for each replica."""
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


def _blocks(config: NativeEngineConfig, architecture: Architecture, tp: int) -> int:
    """Of a replica's cache."""
    _, blocks = local_sizes(config, architecture, tp)
    return blocks
