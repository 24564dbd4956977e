"""A replica whose ranks are separate processes.

    start, load ──order──▶ process of shard 0 ──answer──▶ finish
                ──order──▶ process of shard 1 ──answer──▶        (the same order to all; shard 0 tells the tokens)

Waiting: one order is under way at a time. Giving an order does not wait for it, so that several replicas start, load
and compute side by side. `finish`, `settle` and the next order wait until every rank has answered. A rank that does not
answer in time is killed. The first rank that is seen dead takes the others with it, since they may wait for it in a
collective.
"""

import os
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import NoReturn

import numpy as np
import torch

from tailrace import errors
from tailrace.config.engine import NativeEngineConfig
from tailrace.engine.collectives.factory import meeting_bytes, resolve_collectives
from tailrace.engine.collectives.rendezvous import rendezvous
from tailrace.engine.kv_cache import row_bytes
from tailrace.engine.model.shard import Layout, Shard
from tailrace.engine.model.sharding import head_slots
from tailrace.engine.ranks.base import RankDied, Replica
from tailrace.engine.ranks.rank_process import RankProcess, RankProcesses, end
from tailrace.engine.ranks.staging import StagedWeights
from tailrace.engine.ranks.wire import Answer, Failure, Load, Order, ReadCache, Start, Step, WriteCache
from tailrace.engine.scheduling.step import StepInput, StepOutput
from tailrace.errors import ConfigError, EngineError, TailraceError, UserError
from tailrace.host.cpu import usable_cores
from tailrace.models.architecture import Architecture
from tailrace.types import CacheBytes

START_LIMIT_S = 300.0
"""Time for a rank to compile its kernels on a busy machine, and for the first one's template to import torch."""
_REST_LIMIT_S = 10.0
"""Time for the other ranks, once one has answered with an error: they may wait for it in a collective."""


@dataclass
class _UnderWay:
    """An order that not all ranks have answered."""

    doing: str
    limit_s: float
    given_at: float = field(default_factory=time.monotonic)
    answers: dict[RankProcess, Answer] = field(default_factory=dict)

    @property
    def failure(self) -> Failure | None:
        """The first error that a rank has answered."""
        return next((answer.failure for answer in self.answers.values() if answer.failure is not None), None)


class ProcessReplica(Replica):
    """`config.tp` rank processes. Not thread-safe; one call at a time."""

    def __init__(
        self,
        config: NativeEngineConfig,
        architecture: Architecture,
        replica: int,
        *,
        device: torch.device,
        all_processes: RankProcesses | None = None,
        processes: Sequence[RankProcess] = (),
        weights: StagedWeights | None = None,
    ) -> None:
        """Start the processes of copy number `replica`. They make their ranks meanwhile; the first order waits.

        Args:
            all_processes: The set of the engine's processes; by default a new one.
            processes: Processes to take instead, which have the replica's ranks already.
            weights: The weights that those processes have.

        Raises:
            ConfigError: the collectives or the number of ranks do not suit the device.
            EngineError: the machine has no room for another process.
        """
        self._all_processes = RankProcesses() if all_processes is None else all_processes
        self._layout = Layout(dp=config.dp, tp=config.tp)
        self._devices = [rank_device(device, rank, self._layout.ranks) for rank in self._layout.members(replica)]
        self._config = resolve_collectives(config, device) if config.tp > 1 or config.adaptive_tp else config
        self._architecture = architecture
        self._replica = replica
        self._weights = weights
        self._under_way: _UnderWay | None = None
        self._meeting = ExitStack()
        self._processes = list(processes)
        weakref.finalize(self, end, self._processes)
        if not processes:
            self._spawn()

    def start(self, step: StepInput) -> None:
        """See `Replica`."""
        self._order(Step(step), doing="computing a step", limit_s=self._config.step_timeout_s)

    def finish(self) -> StepOutput:
        """See `Replica`."""
        output = self._collect()[self._processes[0]].output
        assert output is not None, "shard 0 tells the tokens"
        return output

    def waitables(self) -> list[int]:
        """See `Replica`."""
        return [process.channel.fileno() for process in self._processes]

    def read_cache(self, blocks: Sequence[int]) -> CacheBytes:
        """See `Replica`."""
        a, width = self._architecture, row_bytes(self._architecture, self._config)
        self.tell([ReadCache(list(blocks))] * self._layout.tp, doing="giving out a cache")
        whole = np.empty((a.layers, 2, len(blocks), a.kv_heads, width), np.uint8)
        for heads, answer in zip(self._kv_heads(), self.answers(), strict=True):
            assert answer.cache is not None, "each shard gives its own heads"
            whole[:, :, :, heads] = np.frombuffer(answer.cache, np.uint8).reshape(*whole.shape[:3], len(heads), width)
        return whole

    def write_cache(self, blocks: Sequence[int], data: CacheBytes) -> None:
        """See `Replica`."""
        parts = [bytearray(data[:, :, :, heads].tobytes()) for heads in self._kv_heads()]
        self.tell([WriteCache(list(blocks), part) for part in parts], doing="taking in a cache")
        self.answers()

    def _kv_heads(self) -> list[list[int]]:
        """The KV heads of each shard."""
        tp = self._layout.tp
        return [[slot.kv_head for slot in head_slots(self._architecture, Shard(index, tp))] for index in range(tp)]

    @property
    def pids(self) -> list[int]:
        """See `Replica`."""
        return [process.pid for process in self._processes]

    def load(self, named: Mapping[str, torch.Tensor]) -> None:
        """See `Replica`. Several replicas can share `StagedWeights`; other tensors are staged for this one alone."""
        self._weights = named if isinstance(named, StagedWeights) else StagedWeights.write(named)
        self._load()

    def settle(self) -> None:
        """See `Replica`."""
        if self._under_way is None:
            return
        try:
            self._collect()
        except TailraceError:  # ranks that are half made or half loaded are of no use
            self.close()
            raise

    def restart(self) -> None:
        """See `Replica`."""
        self.close()
        try:
            self._spawn()
            if self._weights is not None:
                self._load()
            self.settle()
        except RankDied:
            raise
        except (EngineError, UserError) as error:
            raise EngineError(f"the ranks of replica {self._replica} cannot be made again: {error}") from error

    def close(self) -> None:
        """See `Replica`."""
        self._under_way = None
        self._all_processes.end(self._processes)
        self._processes.clear()
        self._meeting.close()

    @property
    def weights(self) -> StagedWeights | None:
        """The weights that were loaded last."""
        return self._weights

    def tell(self, orders: Sequence[Order], *, doing: str) -> None:
        """Give each rank an order of its own; `answers` waits for them.

        Raises:
            RankDied: here or from `answers`.
        """
        self.settle()
        self._check_alive()
        self._give(orders, doing, self._longest_s)

    @property
    def silent(self) -> dict[int, RankProcess]:
        """The ranks that have not answered the order under way, by the descriptor that is readable when one has."""
        answered = {} if self._under_way is None else self._under_way.answers
        return {process.channel.fileno(): process for process in self._processes if process not in answered}

    @property
    def patience_s(self) -> float:
        """Seconds left for the order under way; below zero when it is overdue."""
        order = self._under_way
        assert order is not None, "no order is under way"
        return order.given_at + order.limit_s - time.monotonic()

    def hear(self, ready: Collection[int]) -> None:
        """Take the answers of those silent ranks whose descriptors are `ready`, without waiting for the others.

        Raises:
            RankDied: one of them has died, or the order is overdue.
            ModelError, ConfigError, EngineError: a rank that lives reports this error; the others may wait for it.
        """
        order, silent = self._under_way, self.silent
        assert order is not None, "no order is under way"
        self._take(order, [process for descriptor, process in silent.items() if descriptor in ready])
        if order.failure is not None:
            raise _error(order.failure)
        if self.silent and self.patience_s <= 0:
            self._give_up(order, list(self.silent.values()))

    def answers(self) -> list[Answer]:
        """Return the answers of the ranks to the order under way, in the order of the ranks.

        Raises:
            RankDied: a rank died on the way.
            ModelError, ConfigError, EngineError: a rank that lives reports this error.
        """
        answers = self._collect()
        return [answers[process] for process in self._processes]

    def release(self) -> list[RankProcess]:
        """Give the processes away; they stay alive. The replica is of no further use."""
        self.settle()
        processes = self._processes.copy()
        self._processes.clear()
        return processes

    def _spawn(self) -> None:
        directory = ""
        if self._layout.tp > 1:
            directory = self._meeting.enter_context(rendezvous(meeting_bytes(self._config, self._layout.tp))).directory
        try:
            for rank in self._layout.members(self._replica):
                self._processes.append(self._all_processes.hire(rank))
        except BaseException:  # also when interrupted: no process may stay behind
            self.close()
            raise
        self._give([self._start_order(process, directory) for process in self._processes], "starting", START_LIMIT_S)

    def _start_order(self, process: RankProcess, rendezvous: str) -> Start:
        return Start(
            config=self._config.model_dump_json(),
            architecture=self._architecture,
            rank=process.rank,
            device=str(self._devices[process.rank % self._layout.tp]),
            threads=threads_per_rank(self._config),
            rendezvous=rendezvous,
            # Longer than the driver waits, which knows better than a rank why others are missing.
            timeout_s=self._longest_s,
            environment=dict(os.environb),
            cores=usable_cores(),
        )

    @property
    def _longest_s(self) -> float:
        """The longest time that any order may take."""
        return max(self._config.step_timeout_s, START_LIMIT_S)

    def _load(self) -> None:
        assert self._weights is not None
        order = Load(self._weights.places)
        self._order(order, doing="loading weights", limit_s=self._longest_s, descriptor=self._weights.descriptor)

    def _order(self, order: Order, *, doing: str, limit_s: float, descriptor: int | None = None) -> None:
        self.settle()
        self._check_alive()
        self._give([order] * len(self._processes), doing, limit_s, descriptor)

    def _check_alive(self) -> None:
        if not self._processes:
            raise RankDied(f"the ranks of replica {self._replica} have ended")

    def _give(self, orders: Sequence[Order], doing: str, limit_s: float, descriptor: int | None = None) -> None:
        self._under_way = _UnderWay(doing, limit_s)
        for process, order in zip(self._processes, orders, strict=True):
            try:
                process.channel.send(order, descriptor=descriptor, limit_s=limit_s)
            except TimeoutError:
                self._give_up(self._under_way, [process])
            except ConnectionError:
                self._raise_death(self._under_way, [process], RankProcess.cause_of_death)

    def _collect(self) -> dict[RankProcess, Answer]:
        """Wait for every rank's answer to the order under way."""
        order = self._under_way
        assert order is not None, "no order is under way"
        deadline = order.given_at + order.limit_s
        while awaited := self.silent:
            ready = wait(list(awaited), max(0.0, deadline - time.monotonic()))
            if not ready:
                self._give_up(order, list(awaited.values()))
            self._take(order, [awaited[descriptor] for descriptor in ready if isinstance(descriptor, int)])
            if order.failure is not None:
                deadline = min(deadline, time.monotonic() + _REST_LIMIT_S)
        self._under_way = None
        self._meeting.close()  # every rank has been made
        if order.failure is not None:
            raise _error(order.failure)
        return order.answers

    def _take(self, order: _UnderWay, processes: Sequence[RankProcess]) -> None:
        """Receive the answers of processes whose channels have news. A process that has hung up is dead."""
        dead = []
        for process in processes:
            try:
                order.answers[process] = process.channel.receive_answer(limit_s=order.limit_s)
            except TimeoutError:
                self._give_up(order, [process])
            except ConnectionError:
                dead.append(process)
        if dead:
            self._raise_death(order, dead, RankProcess.cause_of_death)

    def _give_up(self, order: _UnderWay, silent: Sequence[RankProcess]) -> NoReturn:
        """End the ranks, some of which have not answered in time."""
        if order.failure is not None:
            self.close()
            raise _error(order.failure)
        self._raise_death(order, silent, lambda _: f"killed after {order.limit_s:g} s without an answer")

    def _raise_death(
        self, order: _UnderWay, dead: Sequence[RankProcess], cause: Callable[[RankProcess], str]
    ) -> NoReturn:
        """End the other ranks, and raise an error that says how the `dead` ones died."""
        notice = "; ".join(f"{process} died while {order.doing}: {cause(process)}" for process in dead)
        self.close()
        raise RankDied(notice)


def rank_device(device: torch.device, rank: int, ranks: int) -> torch.device:
    """The device of `rank` of `ranks`: the CUDA device of its number, unless `device` names the one of a lone rank.

    Raises:
        ConfigError: there are fewer CUDA devices than ranks, or `device` is a single one of them.
    """
    if device.type != "cuda" or (ranks == 1 and device.index is not None):
        return device
    if device.index is not None:
        raise ConfigError(f"{ranks} ranks (engine.dp · engine.tp) cannot share {device}; use the device cuda")
    if ranks > torch.cuda.device_count():
        raise ConfigError(
            f"{ranks} ranks (engine.dp · engine.tp) need as many CUDA devices, and there are "
            f"{torch.cuda.device_count()}; lower engine.dp or engine.tp"
        )
    return torch.device("cuda", rank)


def threads_per_rank(config: NativeEngineConfig) -> int:
    """The number of threads of each rank process."""
    return config.threads_per_rank or max(1, len(usable_cores()) // config.ranks)


def _error(failure: Failure) -> TailraceError:
    error: type[TailraceError] = getattr(errors, failure.kind)
    return error(failure.message)
