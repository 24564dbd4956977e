"""Simulates candidates side by side, in processes, where that is worth their start."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from multiprocessing import active_children, get_context

from tailrace.errors import PlanError
from tailrace.host.descendants import end_with_parent
from tailrace.planner.candidates import Candidate
from tailrace.planner.problem import Problem
from tailrace.planner.trial import Plan, simulate

Trial = tuple[Problem, Candidate]
Simulate = Callable[[Sequence[Trial]], list[Plan]]
"""Simulates candidates, each of its problem, and returns their plans in the same order."""

_WORTH = 6000
"""Responses of the drawn steps from which on a process simulates enough in the seconds that its start takes."""
_MOST = 4
_LIMIT_S = 3600.0
"""Seconds in which a few simulations have ended."""


def one_by_one(trials: Sequence[Trial]) -> list[Plan]:
    """Simulate in this process."""
    return [simulate(problem, candidate) for problem, candidate in trials]


@contextmanager
def side_by_side(problem: Problem) -> Iterator[Simulate]:
    """Yield what simulates on several cores, or in this process alone where the problem is small."""
    cores = min(_MOST, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    if cores == 1 or problem.steps * problem.config.trainer.train_batch_size < _WORTH:
        yield one_by_one
        return
    with ProcessPoolExecutor(cores, mp_context=get_context("spawn"), initializer=end_with_parent) as pool:
        yield partial(_simulated_by, pool)


def _simulated_by(pool: ProcessPoolExecutor, trials: Sequence[Trial]) -> list[Plan]:
    died = "a process that simulated has died: this machine may have too little memory"
    late = f"simulations have not ended after {_LIMIT_S / 60:.0f} minutes; give fewer choices"
    with answered(died=died, late=late):
        return list(pool.map(_simulated, trials, timeout=_LIMIT_S))


@contextmanager
def answered(*, died: str, late: str) -> Iterator[None]:
    """Wait for processes of a pool inside the block.

    Raises:
        PlanError: `died`, one has died; `late`, the time is over, and all child processes are ended.
    """
    try:
        yield
    except BrokenProcessPool:
        raise PlanError(died) from None
    except TimeoutError:
        for child in active_children():
            child.terminate()  # else the end of the pool would wait for it
        raise PlanError(late) from None


def _simulated(trial: Trial) -> Plan:
    return simulate(*trial)
