"""The courses by which degrees are compared, against the simulation of every end."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.planning.drain import Held, Work, drain, unshared
from tailrace.planning.latency import CorrectedPredictor, LatencyPredictor
from tailrace.planning.tp_course import Course, InOrder, course, moments
from tailrace.planning.tp_profile import UnevenPoint
from tests.planning.tp_profiles import StepFormula, made_profile

WORK = st.tuples(st.integers(16, 300), st.integers(1, 60))
"""Contexts of at least the shortest that the profile has: steps of shorter ones take as long."""
REPLICAS = st.lists(st.lists(WORK, max_size=6), min_size=4, max_size=4)


def apart(tp: int, size: int, tokens: int, replicas: int) -> float:
    return 0.002 + 1e-3 * size + 1e-5 * tokens


def contended(tp: int, size: int, tokens: int, replicas: int) -> float:
    return apart(tp, size, tokens, replicas) + 2e-3 * replicas


def predictor(step: StepFormula) -> CorrectedPredictor:
    return CorrectedPredictor(LatencyPredictor(made_profile(step, ranks=4, degrees=(1, 2, 4))))


def course_of(step: StepFormula, replicas: list[list[Work]], waiting: list[Work], **limits: Any) -> Course:
    """The course under TP 1."""
    return course_of_held(step, [unshared(running) for running in replicas], unshared(waiting), **limits)


def course_of_held(step: StepFormula, replicas: list[list[Held]], waiting: list[Held], **limits: Any) -> Course:
    in_order = InOrder.of([*itertools.chain.from_iterable(replicas), *waiting])
    return course(predictor(step), 1, replicas, waiting, in_order, **limits)


def simulated(
    step: StepFormula, replicas: list[list[Work]], waiting: list[Work], slots: int = 8, cache_tokens: float = math.inf
) -> tuple[list[float], list[float]]:
    """Seconds until each moment and the end: of the course, and as the simulation of every end has them."""
    at = moments(sum(map(len, replicas)) + len(waiting))
    limits: dict[str, Any] = {"slots": slots, "cache_tokens": cache_tokens}
    found = course_of(step, replicas, waiting, at=at, **limits)
    later = drain(predictor(step), 1, replicas, waiting, stops=at[1:], **limits)
    reached = [next(state.seconds for state in later if state.unfinished <= number) for number in at[1:]]
    return found.seconds.tolist(), [0.0, *reached, later[-1].seconds]


@pytest.mark.parametrize("unfinished", range(300))
def test_a_course_is_seen_whenever_an_eighth_has_ended(unfinished: int) -> None:
    at = moments(unfinished)
    assert at[0] == unfinished
    assert at[-1] == min(unfinished, 1)
    assert all(before > after and 8 * (before - after) >= before for before, after in itertools.pairwise(at))


@given(REPLICAS)
def test_where_replicas_do_not_compete_it_takes_what_the_simulation_takes(replicas: list[list[Work]]) -> None:
    found, expected = simulated(apart, replicas, [])
    assert found == pytest.approx(expected, rel=0.02)


@given(REPLICAS)
def test_where_they_compete_it_takes_nearly_as_much(replicas: list[list[Work]]) -> None:
    found, expected = simulated(contended, replicas, [])
    assert found[-1] == pytest.approx(expected[-1], rel=0.2)


@given(REPLICAS, st.lists(WORK, max_size=4), st.integers(2, 8), st.sampled_from([300.0, 700.0, 5000.0]))
def test_where_places_or_cache_are_short_it_is_the_simulation(
    replicas: list[list[Work]], waiting: list[Work], slots: int, cache_tokens: float
) -> None:
    found, expected = simulated(apart, replicas, waiting, slots, cache_tokens)
    assert found == pytest.approx(expected, rel=0.02)


def test_replicas_of_other_batches_take_what_was_measured_beside_these() -> None:
    uneven = tuple(
        UnevenPoint(tp=1, batch_size=size, others=others, seconds=ratio, even_s=1.0)
        for size, others, ratio in ((1, 16, 1.5), (16, 1, 0.5))
    )
    profile = made_profile(lambda *_: 0.01, ranks=2, degrees=(1, 2), uneven=uneven)
    replicas = [unshared([(100, 30)]), unshared([(100, 20)] * 16)]
    in_order = InOrder.of(list(itertools.chain.from_iterable(replicas)))
    predictor = CorrectedPredictor(LatencyPredictor(profile))
    found = course(predictor, 1, replicas, [], in_order, slots=16, cache_tokens=math.inf, at=[17, 1])
    # the one step of 16 takes half as long beside one sequence, and that one half as long again until they have ended
    assert found.seconds[1] == pytest.approx(20 * 0.005)
    assert found.seconds[2] == pytest.approx(30 * 0.01 + 0.5 * 30 * 0.01 * 20 / 30)


def test_a_replica_is_costed_beside_the_batches_that_the_other_has_on_average() -> None:
    # beside 3 sequences, which end after 6 of 102 steps, and one that is beside it until the end
    uneven = tuple(
        UnevenPoint(tp=1, batch_size=size, others=others, seconds=ratio, even_s=1.0)
        for size, others, ratio in ((1, 4, 1.5), (4, 1, 0.5))
    )
    profile = made_profile(lambda *_: 0.01, ranks=2, degrees=(1, 2), uneven=uneven)
    replicas = [unshared([(100, 102)]), unshared([(100, 6)] * 3 + [(100, 102)])]
    in_order = InOrder.of(list(itertools.chain.from_iterable(replicas)))
    predictor = CorrectedPredictor(LatencyPredictor(profile))
    found = course(predictor, 1, replicas, [], in_order, slots=16, cache_tokens=math.inf, at=[5])
    assert found.seconds[-1] == pytest.approx(102 * 0.01 + 6 * 0.005)


EVEN: list[list[Work]] = [
    [(100, 10), (100, 30)],
    [(100, 10), (100, 30)],
    [(100, 10), (100, 30)],
    [(100, 10), (100, 30)],
]


def seen(replicas: list[list[Work]], **changes: Any) -> Course:
    limits: dict[str, Any] = {"slots": 8, "cache_tokens": math.inf, "at": [8, 4]}
    return course_of(apart, replicas, [], **(limits | changes))


def test_a_degree_that_begins_later_has_its_sequences_shared_out_evenly() -> None:
    even, uneven = seen(EVEN), seen([[(100, 10)] * 4, [(100, 30)] * 4, [], []])
    assert even.runs_s == pytest.approx(np.diff(even.seconds))
    assert uneven.runs_s == pytest.approx(even.runs_s)
    assert uneven.seconds[-1] > 1.2 * even.seconds[-1]


def test_a_degree_is_no_choice_while_it_has_no_room_for_all() -> None:
    assert np.isfinite(seen(EVEN, slots=1).runs_s).tolist() == [False, True]
    assert np.isfinite(seen(EVEN, cache_tokens=219).runs_s).tolist() == [False, True]
    assert np.isfinite(seen(EVEN, cache_tokens=220).runs_s).tolist() == [True, True]


def test_a_prompt_that_a_group_shares_takes_room_once() -> None:
    # 8 responses of one prompt of 96 tokens hold 96 + 8 × 4, and 8 × 10 more in the end
    group: list[Held] = [*[((100, 10), 4)] * 7, ((100, 10), 100)]
    fits, short = (
        course_of_held(apart, [group, [], [], []], [], slots=8, cache_tokens=tokens, at=[8]) for tokens in (208, 207)
    )
    alone = course_of(apart, [[(100, 10)] * 8, [], [], []], [], slots=8, cache_tokens=math.inf, at=[8])
    assert fits.seconds == pytest.approx(alone.seconds)
    assert short.seconds[-1] > fits.seconds[-1]


def test_the_longest_response_may_be_behind_or_before_the_others() -> None:
    assert seen(EVEN).stretch == pytest.approx([1.0, 1.0])
    waited = seen(EVEN, slots=1)  # those of 30 tokens begin when those of 10 have ended, 10 steps in
    assert waited.stretch == pytest.approx([1.0, 30 / 20])
    ahead = seen([[(100, 30)], [(100, 10)] * 4, [(100, 10)] * 2, []], at=[7, 1])
    assert ahead.stretch[1] < 1.0, "alone on its replica, it is quicker than those of 10"


def test_the_tokens_of_those_that_are_left_have_grown() -> None:
    found = seen([[(100, 10), (200, 30)], [], [], []], at=[2, 1])
    assert found.unfinished.tolist() == [2, 1]
    assert found.tokens.tolist() == [300, 210]
    assert found.pairs.tolist() == pytest.approx([100**2 + 200**2, 210**2])


def test_an_engine_without_sequences_is_done() -> None:
    assert seen([[], [], [], []], at=[0]).seconds.tolist() == [0.0, 0.0]


@given(REPLICAS.filter(any))
def test_something_is_left_at_every_moment(replicas: list[list[Work]]) -> None:
    """What cannot run takes for ever, and 0 times that would be no number."""
    at = moments(sum(map(len, replicas)))
    found = course_of(apart, replicas, [], slots=8, cache_tokens=math.inf, at=at)
    assert (found.stretch > 0).all()


def test_where_the_longest_response_ends_first_the_others_are_what_is_left() -> None:
    replicas: list[list[Work]] = [[(10, 60)], [(10, 55)] * 6, [], []]
    found = course_of(lambda tp, size, *_: 0.01 * size, replicas, [], slots=8, cache_tokens=math.inf, at=[7, 6])
    assert found.seconds.tolist() == pytest.approx([0.0, 60 * 0.01, 55 * 0.06])
    # when the one of 60 tokens has ended, those of 55 have made 10; where all advance alike, 5 are left of 60
    assert found.stretch == pytest.approx([1.0, 45 / 5])
