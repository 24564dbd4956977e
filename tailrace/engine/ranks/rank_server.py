"""The process of one rank, which the template has forked for `ProcessReplica`.

It takes orders from its socket, one at a time, and answers each. It never outlives the driver, whatever it is doing. A
thread waits for the other end of the socket to close, or for the template to end. The template ends with the driver,
even while a process that the driver forked holds the socket. Then the thread kills the process group. It can, since
kernels and collectives release the interpreter's lock. A process that is stopped ends when it is continued.
"""

import os
import select
import shutil
import signal
import socket
import statistics
import sys
import threading
from contextlib import suppress

import numpy as np
import torch

from tailrace import errors
from tailrace.config.engine import NativeEngineConfig
from tailrace.engine.collectives.base import Collective
from tailrace.engine.collectives.rendezvous import Rendezvous
from tailrace.engine.memory import spare_bytes
from tailrace.engine.model.shard import Layout, Shard
from tailrace.engine.ranks.groups import Groups
from tailrace.engine.ranks.rank import Rank
from tailrace.engine.ranks.staging import StagedWeights
from tailrace.engine.ranks.wire import (
    AllReduce,
    Answer,
    Channel,
    Failure,
    Load,
    Measure,
    Meet,
    Order,
    ReadCache,
    Start,
    Step,
    Switch,
    WriteCache,
)
from tailrace.errors import EngineError, UserError
from tailrace.host.allocator import keep_freed_memory
from tailrace.host.compute import now

_WATCH_MS = 1000
_ORDER_LIMIT_S = 5.0
"""Seconds to read an order that has come."""


def serve(template: int, descriptor: int) -> None:
    """Serve at the socket `descriptor` until the driver hangs up, as a child of the process `template`.

    An error that is not one of Tailrace's own ends the process, with a traceback.
    """
    keep_freed_memory()
    with suppress(ConnectionError):
        _serve(template, descriptor)


def _serve(template: int, descriptor: int) -> None:
    channel = Channel(socket.socket(fileno=descriptor))
    meetings: list[str] = []
    begun = threading.Event()
    threading.Thread(target=_end_with, args=(template, descriptor, meetings, begun), daemon=True).start()
    try:
        start, _ = channel.receive_order()
        assert isinstance(start, Start), "the first order makes the rank"
        meetings.append(start.rendezvous)
    finally:
        begun.set()
    os.environb.clear()
    os.environb.update(start.environment)
    if sys.platform == "linux":
        os.sched_setaffinity(0, start.cores)
    try:
        server = RankServer(start)
    except (EngineError, UserError) as error:
        channel.send(Answer(failure=_failure(error)))
        return
    channel.send(Answer())
    while True:
        order, file = channel.receive_order()
        if isinstance(order, Meet):
            meetings[:] = order.places.values()
        try:
            answer = server.obey(order, file)
        except (EngineError, UserError) as error:
            answer = Answer(failure=_failure(error))
        channel.send(answer)


def _end_with(template: int, descriptor: int, meetings: list[str], begun: threading.Event) -> None:
    poll = select.poll()
    poll.register(descriptor, 0)  # reports a hang-up and nothing else: the orders are the main thread's
    while os.getppid() == template and not poll.poll(_WATCH_MS):
        pass
    begun.wait(_ORDER_LIMIT_S)  # the first order may be there, though the driver has hung up since
    for directory in meetings:
        shutil.rmtree(directory, ignore_errors=True)  # still there if the ranks have not met
    os.killpg(0, signal.SIGKILL)  # with a compiler that it may have started


class RankServer:
    """A rank, and the communication groups that it belongs to."""

    def __init__(self, start: Start) -> None:
        """Make the rank and its group.

        Raises:
            ModelError, ConfigError, EngineError: see `Rank` and `make_collective`.
        """
        torch.set_num_threads(start.threads)
        self._config = config = NativeEngineConfig.model_validate_json(start.config)
        self._ranks_here = config.engines_here * config.ranks
        """Of all engines on this machine, which may all change at the same time."""
        self._number = start.rank
        self._shard = shard = Layout(dp=config.dp, tp=config.tp).shard(start.rank)
        self._device = device = torch.device(start.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self._groups = Groups(config, start.rank, device=device, timeout_s=start.timeout_s)
        if shard.degree > 1:
            self._groups.add(shard.degree, Rendezvous(start.rendezvous))
        collective = self._groups.get(shard.degree)
        self._rank = Rank(config, start.architecture, shard, device=device, collective=collective)

    def obey(self, order: Order, file: int | None) -> Answer:
        """Carry out an order. Return the answer.

        Args:
            file: The descriptor that came with the order.

        Raises:
            EngineError, UserError: the order cannot be carried out.
        """
        match order:
            case Step(step):
                output = self._rank.execute(step)
                return Answer(output=output if self._shard.index == 0 else None)
            case Load(places):
                assert file is not None, "weights come with a file"
                self._rank.load(StagedWeights(file, places))
                return Answer()
            case Measure():
                return Answer(spare_bytes=spare_bytes(self._device, self._ranks_here))
            case Meet(places):
                for degree in sorted(places):
                    self._groups.add(degree, Rendezvous(places[degree]))
                return Answer()
            case AllReduce(count, times):
                return Answer(seconds=all_reduce_s(self._groups.get(self._shard.degree), count, times, self._device))
            case Switch(degree, migrations):
                shard = Shard(self._number % degree, degree)
                answer = Answer(times=self._rank.switch(shard, migrations, self._groups.get))
                self._shard = shard
                return answer
            case ReadCache() | WriteCache():
                return self._move_cache(order)
            case Start():
                raise AssertionError("a rank is made once")

    def _move_cache(self, order: ReadCache | WriteCache) -> Answer:
        if isinstance(order, ReadCache):
            return Answer(cache=bytearray(self._rank.read_cache(order.blocks).data))
        self._rank.write_cache(order.blocks, np.frombuffer(order.data, np.uint8))
        return Answer()


def all_reduce_s(group: Collective, count: int, times: int, device: torch.device) -> float:
    """Measure the median seconds of `times` sums of `count` fp32 entries."""
    tensor = torch.zeros(count, dtype=torch.float32, device=device)
    seconds = []
    for _ in range(times):
        began = now(device)
        group.all_reduce(tensor)
        seconds.append(now(device) - began)
    return statistics.median(seconds)


def _failure(error: EngineError | UserError) -> Failure:
    """Describe an error under the name of its nearest class that every process knows."""
    known = (kind.__name__ for kind in type(error).__mro__ if kind.__module__ == errors.__name__)
    return Failure(next(known), str(error))
