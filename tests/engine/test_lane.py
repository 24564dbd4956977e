"""Replicas that die, fail or stand still beside each other. Stand-ins play their ranks."""

import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence

import pytest
import torch

from tailrace.config.engine import NativeEngineConfig
from tailrace.conformance.requests import make_request
from tailrace.engine import arrangement as arrangement_module
from tailrace.engine import lane as lane_module
from tailrace.engine.core import EngineCore
from tailrace.engine.lane import MAX_DEATHS
from tailrace.engine.ranks.base import RankDied, Replica
from tailrace.engine.scheduling.step import StepInput, StepOutput
from tailrace.errors import EngineError
from tailrace.types import CacheBytes
from tests.conftest import TinyModel
from tests.engine.helpers import run_core

TIMEOUT_S = 1000.0


class StandIn(Replica):
    """A replica that draws token 7 at once. A test can make it stand still, fail, or die when it restarts."""

    def __init__(self) -> None:
        self.still = False
        self.error: EngineError | None = None
        self.deaths_to_come = 0
        self.restarts = 0
        self._input: StepInput | None = None
        self._reading, self._writing = os.pipe()

    @property
    def pids(self) -> list[int]:
        return []

    def start(self, step: StepInput) -> None:
        self._input = step
        if not self.still:
            os.write(self._writing, b"!")

    def finish(self) -> StepOutput:
        assert self._input is not None
        step, self._input = self._input, None
        if self.still:
            raise RankDied("rank 9 was killed after a while")
        os.read(self._reading, 1)
        if self.error is not None:
            raise self.error
        drawn = sum(chunk.draw is not None for chunk in step.chunks)
        return StepOutput([7] * drawn, [-1.0] * drawn)

    def waitables(self) -> list[int]:
        return [self._reading]

    def read_cache(self, blocks: Sequence[int]) -> CacheBytes:
        raise AssertionError("no test asks for it")

    def write_cache(self, blocks: Sequence[int], data: CacheBytes) -> None:
        raise AssertionError("no test asks for it")

    def load(self, named: Mapping[str, torch.Tensor]) -> None:
        """There is nothing to load."""

    def settle(self) -> None:
        """Nothing is under way."""

    def restart(self) -> None:
        self.restarts += 1
        self.still = False
        if self.deaths_to_come:
            self.deaths_to_come -= 1
            raise RankDied("rank 9 died while starting")

    def close(self) -> None:
        if self._reading >= 0:
            os.close(self._reading)
            os.close(self._writing)
            self._reading = -1


class Clock:
    """A stand-in for the module `time`: each look at it takes a second."""

    def __init__(self) -> None:
        self._seconds = itertools.count()

    def perf_counter(self) -> float:
        return float(next(self._seconds))


Pair = tuple[EngineCore, StandIn, StandIn]


@pytest.fixture
def pair(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    """A core with two stand-ins as replicas."""
    first, second = StandIn(), StandIn()
    monkeypatch.setattr(arrangement_module, "make_replicas", lambda *_, **__: [first, second])
    monkeypatch.setattr(lane_module, "time", Clock())
    settings = NativeEngineConfig(dp=2, block_size=4, kv_cache_gib=0.001, step_timeout_s=TIMEOUT_S)
    core = EngineCore(settings, tiny_model("llama"), device=torch.device("cpu"))
    yield core, first, second
    core.close()


def test_a_replica_that_stands_still_is_found_while_another_has_work(pair: Pair) -> None:
    core, still, _ = pair
    still.still = True
    core.add(make_request(0, max_new_tokens=3, ignore_eos=True))
    samples = []
    for number in range(1, 2000):
        core.add(make_request(number, group_id=1, max_new_tokens=1, ignore_eos=True))
        samples += core.step()
        if core.stats().restarts:
            break
    assert core.stats().restarts == 1, "it went unnoticed"
    assert len(samples) >= 100, "the other one made these meanwhile"
    samples += run_core(core, []).values()
    assert next(sample for sample in samples if sample.request_id == 0).response_ids.tolist() == [7] * 3


def test_a_replica_that_has_just_begun_is_not_waited_for_because_another_is_overdue(pair: Pair) -> None:
    core, still, new = pair
    still.still = new.still = True
    core.add(make_request(0))
    core.lanes[0].begin(0)
    core.lanes[0].began -= TIMEOUT_S
    core.add(make_request(1))
    core.step()
    assert (still.restarts, new.restarts) == (1, 0)
    assert core.lanes[1].busy


def test_what_others_finish_beside_a_replica_that_fails_is_given_before_the_error(pair: Pair) -> None:
    core, failing, _ = pair
    failing.error = EngineError("logits are not finite")
    for number in range(2):
        core.add(make_request(number, max_new_tokens=1, ignore_eos=True))
    samples = core.step()
    assert [sample.request_id for sample in samples] == [1]
    calls: list[Callable[[], object]] = [core.step, core.settle]
    for call in calls:
        with pytest.raises(EngineError, match="not finite"):
            call()


def test_ranks_that_die_while_they_are_made_again_are_made_once_more(pair: Pair) -> None:
    core, dying, _ = pair
    dying.still, dying.deaths_to_come = True, MAX_DEATHS - 1
    core.add(make_request(0, max_new_tokens=2, ignore_eos=True))
    assert run_core(core, [])[0].response_ids.tolist() == [7, 7]
    assert core.stats().restarts == 1


def test_ranks_that_die_too_often_while_they_are_made_again_end_the_engine(pair: Pair) -> None:
    core, dying, _ = pair
    dying.still, dying.deaths_to_come = True, MAX_DEATHS
    core.add(make_request(0))
    with pytest.raises(EngineError, match=r"died while starting; ranks died 4 times in a row without a step done$"):
        core.step()
