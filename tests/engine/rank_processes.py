"""Processes that serve as ranks of a collective. They are made once, and exchange what a test tells them to."""

import multiprocessing
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import torch

from tailrace.config.engine import NativeEngineConfig
from tailrace.engine.collectives.base import Collective
from tailrace.engine.collectives.factory import make_collective
from tailrace.engine.collectives.rendezvous import Rendezvous, rendezvous
from tailrace.engine.model.shard import Shard
from tailrace.errors import EngineError

ANSWER_LIMIT_S = 60
_CONTEXT = multiprocessing.get_context("forkserver")
"""The start method: new processes have torch imported already."""
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Exchange:
    """One call of a collective, and the tensor of each rank in it."""

    verb: Literal["sum", "gather"]
    dtype: str
    shape: tuple[int, ...]
    seed: int = 0

    def part(self, rank: int) -> torch.Tensor:
        """The tensor of `rank`: its numbers differ so much in size that the order of a sum shows."""
        generator = torch.Generator().manual_seed(self.seed * 64 + rank)
        spread = torch.randn(self.shape, generator=generator, dtype=torch.float64)
        return (spread * 10 ** (3 * torch.randn(self.shape, generator=generator))).to(getattr(torch, self.dtype))

    def run(self, collective: Collective) -> bytes:
        tensor = self.part(collective.rank)
        if self.verb == "gather":
            return as_bytes(collective.all_gather(tensor))
        collective.all_reduce(tensor)
        return as_bytes(tensor)


def as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


class RankProcess:
    """A process that can be a rank. Calls return at once; `answer` waits."""

    def __init__(self) -> None:
        _CONTEXT.set_forkserver_preload([__name__])
        self._connection, theirs = _CONTEXT.Pipe()
        self._process = _CONTEXT.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def open(self, kind: str, shard: Shard, place: Rendezvous, timeout_s: float) -> None:
        self._connection.send((_open, (kind, shard, place, timeout_s)))

    def exchange(self, exchanges: Sequence[Exchange]) -> None:
        self._connection.send((_exchange, (exchanges,)))

    def close(self) -> None:
        self._connection.send((_close, ()))

    def answer(self) -> Any:
        """Wait for the result of the oldest unanswered call."""
        assert self._connection.poll(ANSWER_LIMIT_S), "a rank hangs"
        answer = self._connection.recv()
        if isinstance(answer, EngineError):
            raise answer
        return answer

    def signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self._connection.close()


@contextmanager
def rank_processes(count: int) -> Iterator[list[RankProcess]]:
    ranks = [RankProcess() for _ in range(count)]
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.end()


def join(ranks: Sequence[RankProcess], kind: str, timeout_s: float = ANSWER_LIMIT_S) -> None:
    """Make `ranks` one collective, and check that nothing of its rendezvous is left."""
    with rendezvous() as place:
        for index, rank in enumerate(ranks):
            rank.open(kind, Shard(index, len(ranks)), place, timeout_s)
        for rank in ranks:
            rank.answer()
        assert not place.memory.exists()
    assert not Path(place.directory).exists()


def leave(ranks: Sequence[RankProcess]) -> None:
    """End the collective that `ranks` joined."""
    for rank in ranks:
        rank.close()
        rank.answer()


def run(ranks: Sequence[RankProcess], kind: str, exchanges: Sequence[Exchange]) -> list[list[bytes]]:
    """Run `exchanges` on a collective of `ranks`, and return each rank's results as bytes."""
    join(ranks, kind)
    for rank in ranks:
        rank.exchange(exchanges)
    results = [rank.answer() for rank in ranks]
    leave(ranks)
    return results


_collectives: list[Collective] = []
"""The open collective of this rank's process."""


def _serve(connection: Connection) -> None:
    torch.set_num_threads(1)
    while True:
        call, arguments = connection.recv()
        try:
            connection.send(call(*arguments))
        except EngineError as error:
            connection.send(error)


def _open(kind: Any, shard: Shard, place: Rendezvous, timeout_s: float) -> None:
    _collectives.append(make_collective(NativeEngineConfig(collectives=kind), shard, CPU, place, timeout_s))


def _exchange(exchanges: Sequence[Exchange]) -> list[bytes]:
    return [exchange.run(_collectives[0]) for exchange in exchanges]


def _close() -> None:
    _collectives.pop().close()
