"""Tensor-parallel ranks that are threads of the test."""

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from tailrace.engine.collectives.base import Alone, Collective

Result = TypeVar("Result")
LIMIT_S = 60.0


class _Meeting:
    def __init__(self, size: int) -> None:
        self.tensors: list[torch.Tensor | None] = [None] * size
        self.barrier = threading.Barrier(size, timeout=LIMIT_S)


class ThreadCollective(Collective):
    """The collective of one thread."""

    def __init__(self, rank: int, size: int, meeting: _Meeting) -> None:
        self.rank = rank
        self.size = size
        self._meeting = meeting

    def all_reduce(self, tensor: torch.Tensor) -> None:
        assert tensor.is_contiguous()
        assert tensor.dtype in (torch.float32, torch.bfloat16)
        tensor.copy_(self.all_gather(tensor).sum(0))

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        meeting = self._meeting
        meeting.tensors[self.rank] = tensor.clone()
        meeting.barrier.wait()
        gathered = torch.stack([tensor for tensor in meeting.tensors if tensor is not None])
        meeting.barrier.wait()
        return gathered

    def close(self) -> None:
        self._meeting.barrier.abort()


def run_ranks(size: int, work: Callable[[Collective], Result]) -> list[Result]:
    """Run `work` on each of `size` ranks. Return its results, or raise the error of the first rank that failed."""
    return run_engine(size, [size], lambda rank, group: work(group(size)))


def run_engine(
    ranks: int, degrees: Iterable[int], work: Callable[[int, Callable[[int], Collective]], Result]
) -> list[Result]:
    """Run `work` on each rank, and return its results.

    `work` gets the rank's number and a function that gives its collective for each of the `degrees`.
    """
    meetings = {(degree, number): _Meeting(degree) for degree in degrees for number in range(ranks // degree)}

    def run(rank: int) -> Result:
        def group(degree: int) -> Collective:
            if degree == 1:
                return Alone()
            return ThreadCollective(rank % degree, degree, meetings[degree, rank // degree])

        try:
            return work(rank, group)
        except BaseException:
            for meeting in meetings.values():
                meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(ranks) as pool:
        futures = [pool.submit(run, rank) for rank in range(ranks)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    return [future.result() for future in futures]
