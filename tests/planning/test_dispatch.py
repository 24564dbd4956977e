"""Placements of jobs on engines: by hand, and against all that there are."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tailrace.planning.dispatch.balanced import Balanced
from tailrace.planning.dispatch.base import EngineState, Job, Placement
from tailrace.planning.dispatch.seconds import Pulled, engine_s, makespan_s, pulled
from tailrace.planning.dispatch.simple import LeastLoaded, Pull, Random, RoundRobin
from tailrace.planning.dispatch.skewness import Skewness
from tailrace.planning.drain import drain_s
from tailrace.planning.remaining import LengthHistory


@dataclass(frozen=True)
class Linear:
    """Steps of base + each · B + context · T seconds."""

    base: float = 1.0
    each: float = 0.0
    context: float = 0.0
    prefill: float = 0.0

    def step_s(
        self, tp: int, batch_size: float, context_tokens: float, replicas: int, others: float | None = None
    ) -> float:
        return self.base + self.each * batch_size + self.context * context_tokens

    def prefill_s(self, tp: int, batch_size: float, rms_length: float) -> float:
        return self.prefill * batch_size * rms_length


def engine(name: str = "", *, slots: int = 64, cache: int = 10**6, times: Linear | None = None) -> EngineState:
    return EngineState(name=name, times=times or Linear(), slots=slots, cache_tokens=cache)


def jobs(*lengths: float, samples: int = 1, prompt: int = 10) -> list[Job]:
    return [
        Job(group=number, samples=samples, prompt_tokens=prompt, expected_tokens=length)
        for number, length in enumerate(lengths)
    ]


def history(*lengths: int) -> LengthHistory:
    known = LengthHistory()
    for length in lengths:
        known.add(length)
    return known


SKEWED = history(*[100] * 80, *[400] * 20)
"""The median is 100, the 90th percentile 400."""


class TestAlgorithm2:
    def place(self, given: Sequence[Job], count: int, *, cache: int = 10**6) -> Placement:
        times = Linear(base=1, each=1)
        return Skewness(SKEWED, alpha=0.2).place(given, [engine(times=times, cache=cache) for _ in range(count)])

    def test_the_split_is_the_one_with_the_least_sum_of_latencies(self) -> None:
        # N_l = 1: 5 · 400 + 7 · 100 = 2,700; N_l = 2: 3 · 400 + 9 · 100 = 2,100; N_l = 3: 3 · 400 + 17 · 100 = 2,900
        placed = self.place(jobs(*[100] * 16, *[400] * 4), 4)
        assert [sorted(of) for of in placed.of] == [
            [16, 18],
            [17, 19],
            [0, 2, 4, 6, 8, 10, 12, 14],
            [1, 3, 5, 7, 9, 11, 13, 15],
        ]
        assert placed.later == []

    def test_a_cache_that_holds_fewer_makes_several_rounds(self) -> None:
        # two engines, so N_l = 1. Three engines and room for 2 long ones, at 410 tokens each:
        # N_l = 1: 3 · 400 · 2 + PTL(8) 9 · 100 · 1 = 3,300, regular 16 on 2 engines, of which 8 fit at 110 tokens each
        # would need 880; there is room for 7: 8 · 100 · 2 = 1,600 → 4,000. N_l = 2: 3 · 400 · 1 + 8 · 100 · 3 = 3,600
        placed = self.place(jobs(*[100] * 16, *[400] * 4), 3, cache=830)
        assert [len(of) for of in placed.of] == [2, 2, 16]

    def test_one_engine_gets_all_the_longest_first(self) -> None:
        placed = self.place(jobs(5, 9, 7), 1)
        assert placed.of == [[1, 2, 0]]

    @pytest.mark.parametrize("alpha", [0.0, 1.0, -0.2, 20])
    def test_a_share_outside_of_0_to_1_is_refused(self, alpha: float) -> None:
        with pytest.raises(ValueError, match=r"give a share between 0 and 1, such as 0\.2"):
            Skewness(SKEWED, alpha=alpha)


lengths = st.lists(st.integers(1, 300), min_size=1, max_size=6)
linear = st.builds(Linear, base=st.floats(0.5, 5), each=st.floats(0, 2), context=st.floats(0, 0.01))


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(1, 4)), max_size=8), st.integers(0, 5), linear)
def test_samples_that_begin_together_take_as_long_as_the_simulated_engine(
    given: list[tuple[int, int]], running: int, times: Linear
) -> None:
    placed = [
        Job(group=number, samples=samples, prompt_tokens=10 + number, expected_tokens=length)
        for number, (length, samples) in enumerate(given)
    ]
    now = [(50 + number, 20 * number + 1) for number in range(running)]
    state = EngineState(name="", times=times, slots=64, cache_tokens=10**9, running=now)
    works = [(job.prompt_tokens, round(job.expected_tokens)) for job in placed for _ in range(job.samples)]
    assert engine_s(state, placed) == pytest.approx(drain_s(times, 1, [now], works, slots=64) if now or works else 0.0)


def test_a_prompt_is_computed_once_for_all_samples_of_a_job() -> None:
    times = Linear(base=0, prefill=2)
    assert engine_s(engine(times=times), jobs(5, 7, samples=4, prompt=100)) == pytest.approx(2 * 100 * 2)


def best_s(placed: Sequence[Job], engines: Sequence[EngineState]) -> list[float]:
    """The makespan of every assignment there is, the best first."""
    found = []
    for choice in product(range(len(engines)), repeat=len(placed)):
        places = [[job for job, index in enumerate(choice) if index == e] for e in range(len(engines))]
        for of in places:
            of.sort(key=lambda job: placed[job].expected_tokens, reverse=True)
        found.append(makespan_s(engines, placed, places))
    return sorted(found)


@given(lengths, st.lists(linear, min_size=1, max_size=3), st.integers(1, 3))
def test_balanced_is_within_4_3_of_the_best_and_never_worse_than_chance(
    given: list[int], times: list[Linear], slots: int
) -> None:
    engines = [engine(str(number), times=each, slots=2 * slots) for number, each in enumerate(times)]
    placed = jobs(*given)
    found = makespan_s(engines, placed, Balanced().place(placed, engines).of)
    known = best_s(placed, engines)
    assert found <= known[0] * 4 / 3 + 1e-9
    assert found <= sum(known) / len(known) + 1e-9


@given(lengths, st.integers(1, 4))
def test_the_longest_first_is_within_4_3_of_the_best_order_in_the_slots_of_an_engine(
    given: list[int], slots: int
) -> None:
    state = engine(slots=slots)  # a step takes as long with any batch, so a slot is a machine of P||Cmax
    seconds = engine_s(state, jobs(*sorted(given, reverse=True), prompt=1))
    loads = (
        max(sum(length for length, at in zip(given, choice, strict=True) if at == slot) for slot in range(slots))
        for choice in product(range(slots), repeat=len(given))
    )
    assert seconds <= (4 / 3 - 1 / (3 * slots)) * min(loads) + 1e-9


def test_an_engine_with_long_responses_gets_fewer_of_the_others() -> None:
    times = Linear(base=1, each=0.05)
    placed = jobs(*[100] * 30, 900, 880)
    of = Balanced().place(placed, [engine(times=times), engine(times=times)]).of
    long = [index for index, each in enumerate(of) if {30, 31} <= set(each)]
    assert len(long) == 1, "the two long ones share an engine"
    assert len(of[long[0]]) < 16


def drawn(random: np.random.Generator, error: float, count: int) -> tuple[list[Job], list[Job]]:
    """Skewed lengths as they are expected, with that error in their logarithms, and as they come."""
    lengths = np.minimum(2000, 300 * np.exp(0.9 * random.standard_normal(count)))
    told = jobs(*np.minimum(2000, lengths * np.exp(error * random.standard_normal(count))).tolist())
    return [replace(job, deviation=error, most_tokens=2000) for job in told], jobs(*lengths.tolist())


@pytest.mark.parametrize("error", [0.1, 0.3, 1.0, 3.0])
def test_expectations_that_err_as_much_as_they_say_cost_little(error: float) -> None:
    engines = [engine(times=Linear(base=1, each=0.03)) for _ in range(8)]
    seconds: dict[str, float] = dict.fromkeys(("in turn", "as if known", "placed"), 0.0)
    for seed in range(6):
        told, came = drawn(np.random.default_rng(seed), error, 256)
        ways = {
            "in turn": RoundRobin().place(told, engines),
            "as if known": Balanced().place([replace(job, deviation=0.0) for job in told], engines),
            "placed": Balanced().place(told, engines),
        }
        for name, placement in ways.items():
            seconds[name] += makespan_s(engines, came, placement.of)
    assert seconds["placed"] <= 1.01 * seconds["in turn"]
    assert seconds["placed"] <= 1.01 * seconds["as if known"]


def test_a_small_error_leaves_most_of_the_gain() -> None:
    engines = [engine(times=Linear(base=1, each=0.03)) for _ in range(8)]
    told, came = drawn(np.random.default_rng(0), 0.02, 256)
    exact = makespan_s(engines, came, Balanced().place(came, engines).of)
    in_turn = makespan_s(engines, came, RoundRobin().place(came, engines).of)
    found = makespan_s(engines, came, Balanced().place(told, engines).of)
    assert in_turn - found >= 0.5 * (in_turn - exact)


def test_a_faster_engine_gets_more() -> None:
    engines = [engine(times=Linear(base=0.1, each=1)), engine(times=Linear(base=0.1, each=0.5))]
    slow, fast = Balanced().place(jobs(*[100] * 30), engines).of
    assert len(fast) == pytest.approx(2 * len(slow), abs=2)


def test_what_runs_already_counts() -> None:
    busy = EngineState(name="", times=Linear(each=1), slots=64, cache_tokens=10**6, running=[(10, 500)] * 10)
    of = Balanced().place(jobs(*[100] * 10), [busy, engine(times=Linear(each=1))]).of
    assert of[0] == []


def test_engines_that_pull_start_a_long_response_when_its_turn_comes() -> None:
    engines = [engine(slots=1), engine(slots=1)]
    assert pulled(engines, jobs(2, 2, 4)) == Pulled(6.0, [[0, 2], [1]])
    assert pulled(engines, jobs(4, 2, 2)) == Pulled(4.0, [[0], [1, 2]])
    assert makespan_s(engines, jobs(2, 2, 4), Balanced().place(jobs(2, 2, 4), engines).of) == pytest.approx(4)


@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=40), st.lists(linear, min_size=1, max_size=3), st.integers(1, 4)
)
def test_balanced_is_predicted_no_slower_than_pulling_the_longest_first_where_jobs_wait(
    given: list[int], times: list[Linear], slots: int
) -> None:
    engines = [engine(str(number), times=each, slots=slots) for number, each in enumerate(times)]
    placed = jobs(*sorted(given, reverse=True))
    assume(len(placed) > slots * len(engines))
    found = makespan_s(engines, placed, Balanced().place(placed, engines).of)
    assert found <= pulled(engines, placed).seconds * (1 + 1e-9)


def test_a_job_begins_once_the_cache_holds_it_until_its_end() -> None:
    # 10 + 4 · 15 tokens each: two fit in 150, so the third begins after 15 steps
    state = engine(cache=150)
    assert engine_s(state, jobs(15, 15, samples=4)) == pytest.approx(15)
    assert engine_s(state, jobs(15, 15, 15, samples=4)) == pytest.approx(30)
    assert pulled([state, state], jobs(15, 15, 15, samples=4)) == Pulled(15.0, [[0, 2], [1]])


def test_an_engine_without_room_for_the_next_job_keeps_no_other_from_it() -> None:
    small = engine(slots=128, cache=500)
    large = engine(slots=96, cache=10**6)
    predicted = pulled([small, large], jobs(*[40] * 28, samples=4))
    assert min(map(len, predicted.of)) > 0
    assert predicted.seconds <= engine_s(large, jobs(*[40] * 28, samples=4))


def test_a_replica_decodes_whole_sequences() -> None:
    state = EngineState(name="", times=Linear(base=1, each=1), replicas=4, slots=4, cache_tokens=10**6)
    assert engine_s(state, jobs(10)) == pytest.approx(20), "as on one replica"
    assert engine_s(state, jobs(*[10] * 8)) == pytest.approx(30), "two on each"


def test_pull_gives_what_has_room_in_its_order() -> None:
    placed = Pull().place(jobs(*[5] * 6, samples=2), [engine(slots=4), engine(slots=5)])
    assert placed == Placement([[1, 3], [0, 2, 4]], [5]), "the last slot is for a half of a job"
    larger = Pull().place(jobs(5, 5, samples=8), [engine(slots=4)])
    assert larger == Placement([[0]], [1])


def test_an_engine_with_a_free_slot_takes_a_group_that_needs_more() -> None:
    draining = EngineState(name="", times=Linear(), slots=4, cache_tokens=10**6, running=[(10, 5)] * 3)
    assert Pull().place(jobs(5, 5, samples=8), [draining]) == Placement([[0]], [1])


def test_engines_that_pull_take_by_their_pace_where_there_is_room_for_all() -> None:
    quick, slow = engine(times=Linear(base=8, each=1)), engine(times=Linear(base=16, each=2))
    taken = [len(of) for of in Pull().place(jobs(*[5] * 10), [slow, quick]).of]
    assert taken == [1, 9], "then their steps take 18 and 17 seconds"
    assert [len(of) for of in pulled([slow, quick], jobs(*[5] * 10)).of] == taken
    assert [len(of) for of in Pull().place(jobs(*[5] * 10), [quick, quick]).of] == [5, 5]


@given(lengths, st.lists(st.tuples(linear, st.integers(1, 40)), min_size=1, max_size=4), st.integers(1, 3))
def test_what_is_predicted_of_engines_that_pull_begins_as_they_do(
    given: list[int], kinds: list[tuple[Linear, int]], samples: int
) -> None:
    engines = [engine(slots=slots, times=times) for times, slots in kinds]
    placed = jobs(*given, samples=samples)
    begun = Pull().place(placed, engines).of
    assert [of[: len(first)] for of, first in zip(pulled(engines, placed).of, begun, strict=True)] == begun


def test_round_robin_goes_on_where_it_was() -> None:
    policy, engines = RoundRobin(), [engine(), engine(), engine()]
    assert policy.place(jobs(1, 1, 1, 1), engines).of == [[0, 3], [1], [2]]
    assert policy.place(jobs(1, 1), engines).of == [[], [0], [1]]


def test_the_least_loaded_engine_is_the_one_with_the_most_room() -> None:
    engines = [engine(slots=10), engine(slots=20)]
    assert [len(of) for of in LeastLoaded().place(jobs(*[1] * 30), engines).of] == [10, 20]


@given(
    lengths,
    st.lists(st.tuples(linear, st.sampled_from([1, 3, 8]), st.lists(st.integers(1, 300), max_size=6)), min_size=1),
)
def test_every_job_is_placed_once(given: list[int], kinds: list[tuple[Linear, int, list[int]]]) -> None:
    engines = [
        replace(engine(str(number), slots=slots, times=times), running=[(7, left) for left in running])
        for number, (times, slots, running) in enumerate(kinds)
    ]
    for policy in (Pull(), RoundRobin(), LeastLoaded(), Random(), Skewness(history()), Balanced()):
        placed = policy.place(jobs(*given), engines)
        assert sorted([job for of in placed.of for job in of] + placed.later) == list(range(len(given))), policy.name
        assert math.isfinite(makespan_s(engines, jobs(*given), placed.of))
