"""Claims on replicas whose steps begin and end together."""

from collections.abc import Sequence as List

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.planning.step_times.base import Load
from tailrace.simulator.batch import Batch, Sequence
from tailrace.simulator.lockstep import Lockstep

from .test_batch import Plain


class Slowest(Plain):
    """Steps as long as those of the slowest replica."""

    def lockstep_s(self, tp: int, loads: List[Load]) -> float:
        return max(self.mixed_s(tp, load.batch_size, load.context_tokens, load.chunk) for load in loads)


def replicas(number: int, *, slots: int = 4, cache_tokens: float = 1e9) -> Lockstep:
    times = Slowest()
    each = [Batch(times=times, slots=slots, cache_tokens=cache_tokens, prefill_tokens=100) for _ in range(number)]
    return Lockstep(times, each)


def test_one_that_decodes_waits_for_one_that_computes_a_prompt() -> None:
    both = replicas(2)
    first, second = both.batches
    first.add(Sequence(prompt=10, length=20))
    assert both.begin() == pytest.approx(1.01)  # the other has nothing to do, and takes part
    both.end()
    second.add(late := Sequence(prompt=250, length=1))
    assert both.begin() == pytest.approx(2 * 1.1)  # two whole chunks of 100 tokens, beside a sequence that decodes
    both.end()
    assert both.begin() == pytest.approx(1.1)
    assert both.end().ended == [late]
    assert both.begin() == pytest.approx(16 * 1.1)


def test_a_stretch_that_is_cut_ends_for_all_with_the_step_under_way() -> None:
    both = replicas(2)
    sequences = [Sequence(prompt=1, length=100) for _ in both.batches]
    for batch, sequence in zip(both.batches, sequences, strict=True):
        batch.add(sequence)
    both.begin()
    both.end()
    both.begin()
    assert both.cut(elapsed_s=2.5 * 1.1) == pytest.approx(3 * 1.1)
    both.end()
    assert [batch.made(one) for batch, one in zip(both.batches, sequences, strict=True)] == [4, 4]


REQUESTS = st.lists(st.tuples(st.integers(1, 300), st.integers(1, 60)), min_size=1, max_size=25)


@given(REQUESTS, st.integers(1, 3), st.integers(400, 2000))
@settings(max_examples=100, deadline=None)
def test_stretches_take_as_long_as_single_steps(requests: list[tuple[int, int]], number: int, cache: int) -> None:
    def made(*, single: bool) -> tuple[list[tuple[float, int]], int]:
        together = replicas(number, cache_tokens=cache)
        for index, (prompt, length) in enumerate(requests):
            together.batches[index % number].add(Sequence(prompt, length))
        now, ends = 0.0, []
        while (seconds := together.begin()) is not None:
            now += together.cut(0.0) if single else seconds
            ends += [(round(now, 6), sequence.prompt) for sequence in together.end().ended]
        return sorted(ends), sum(batch.generated for batch in together.batches)

    stretches, steps = made(single=False), made(single=True)
    assert stretches == steps
    assert len(stretches[0]) == len(requests)
    assert stretches[1] == sum(length for _, length in requests)
