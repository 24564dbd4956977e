"""The time until an engine has nothing left to do."""

import itertools
import math
from collections import deque
from collections.abc import Collection
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.planning.drain import Drained, Held, Work, drain, drain_held, drain_s
from tailrace.planning.latency import LatencyPredictor, StepTimes, alike
from tailrace.planning.tp_profile import UnevenPoint
from tests.planning.tp_profiles import flat, made_profile


def predictor(a_sequence: float = 1e-3) -> StepTimes:
    """A predictor of steps of 10 ms at TP 1, plus `a_sequence` seconds a sequence; prefilling takes 1 ms a token."""
    return LatencyPredictor(made_profile(flat({1: 0.01, 2: 0.006}, a_sequence)))


def linear(tp: int, size: int, tokens: int, replicas: int) -> float:
    return 0.002 + 1e-3 * size + 1e-5 * tokens + 5e-3 * replicas


LINEAR = LatencyPredictor(made_profile(linear, ranks=4, degrees=(1, 2, 4)))
WORK = st.tuples(st.integers(1, 300), st.integers(1, 50))
RUNNING = st.lists(WORK, max_size=6)


def test_nothing_takes_no_time() -> None:
    assert drain_s(predictor(), 1, [[], []], [], slots=4) == 0.0


def test_a_batch_decodes_faster_when_one_has_ended() -> None:
    # 4 steps of both, 12 ms each, then 6 of the other, 11 ms each
    assert drain_s(predictor(), 1, [[(5, 10), (5, 4)], []], [], slots=4) == pytest.approx(0.114)


def test_contexts_grow_by_a_token_a_step() -> None:
    # 100, 101 and 102 context tokens at 10 µs, and another 8 ms a step
    assert drain_s(LINEAR, 4, [[(100, 3)]], [], slots=4) == pytest.approx(303e-5 + 3 * 0.008)


def test_replicas_run_beside_each_other() -> None:
    assert drain_s(predictor(), 1, [[(5, 10)], [(5, 4)]], [], slots=4) == pytest.approx(0.11)


def test_a_replica_that_is_done_slows_the_other_no_longer() -> None:
    # 40 steps of 15 ms beside each other, then 60 of 10 ms alone
    contended = LatencyPredictor(made_profile(lambda tp, size, tokens, replicas: 0.005 + 0.005 * replicas))
    assert drain_s(contended, 1, [[(5, 100)], [(5, 40)]], [], slots=4) == pytest.approx(1.2)


UNEVEN = tuple(
    UnevenPoint(tp=1, batch_size=size, others=others, seconds=ratio * 0.1, even_s=0.1)
    for size, others, ratio in ((1, 4, 1.5), (4, 1, 0.5))
)
"""One sequence beside four takes half as long again, and four beside one take half as long."""
BESIDE = LatencyPredictor(made_profile(flat({1: 0.01, 2: 0.01}, 0.0), uneven=UNEVEN))
"""Steps of 10 ms where both replicas have the same batch, or there is one."""


def test_a_replica_is_costed_beside_the_batch_of_the_other() -> None:
    # 5 ms for the 4 sequences, which end at 30 ms, 15 ms for the one beside them: it has a step of 10 ms left then
    assert drain_s(BESIDE, 1, [[(5, 3)], [(5, 6)] * 4], [], slots=4) == pytest.approx(0.04)


def test_a_replica_is_costed_anew_when_the_batch_of_the_other_has_shrunk() -> None:
    # until 3 of the 4 end at 30 ms, the one makes 2 tokens; then both replicas have one sequence, and take 10 ms
    running: list[list[Work]] = [[(5, 102)], [(5, 6), (5, 6), (5, 6), (5, 106)]]
    assert drain_s(BESIDE, 1, running, [], slots=4) == pytest.approx(0.03 + 100 * 0.01)


def test_a_step_that_is_half_done_when_another_replica_ends_goes_on_faster() -> None:
    # sizes 1 and 2 take 20 and 30 ms beside each other, 10 ms less alone. The second ends at 30 ms, in the middle of
    # the first one's second step; that and 2 more steps are left, 1.5 + 1 of 10 ms
    contended = LatencyPredictor(made_profile(lambda tp, size, tokens, replicas: 0.01 * size + 0.01 * (replicas - 1)))
    assert drain_s(contended, 1, [[(5, 4)], [(5, 1), (5, 1)]], [], slots=4) == pytest.approx(0.03 + 2.5 * 0.01)


def test_one_that_waits_takes_a_place_when_it_is_free_and_is_prefilled() -> None:
    # 3 steps of 11 ms, 50 prompt tokens, 2 steps of 11 ms
    assert drain_s(predictor(), 2, [[(100, 3)]], [(50, 2)], slots=1) == pytest.approx(3 * 0.007 + 0.05 + 2 * 0.007)


def test_what_waits_is_shared_out_over_the_places_that_are_free_at_once() -> None:
    assert drain_s(predictor(), 1, [[], []], [(50, 2), (50, 2)], slots=4) == pytest.approx(0.05 + 2 * 0.011)


def test_what_runs_beyond_the_places_waits_first() -> None:
    waiting: list[Work] = [(30, 1)]
    merged = drain_s(predictor(), 2, [[(100, 3), (50, 2)]], waiting, slots=1)
    assert merged == drain_s(predictor(), 2, [[(100, 3)]], [(50, 2), *waiting], slots=1)


def step_by_step(
    running: list[Work], waiting: list[Work], slots: int, stops: Collection[int] = (), cache_tokens: float = math.inf
) -> list[tuple[float, list[Work], list[Work]]]:
    """Drain one replica step by step: (seconds, running, waiting) at each stop and at the end.

    What waits starts when another has ended. The batch is in the order of starts.
    """
    batch, queue = list(running), deque(waiting)
    seconds, seen, starts = 0.0, [], True
    while batch or queue:
        before = len(batch) + len(queue)
        while len(batch) > 1 and held(batch) + len(batch) > cache_tokens:
            queue.appendleft(batch.pop())
        joining: list[Work] = []
        while starts and queue and fits([*batch, *joining, queue[0]], slots, cache_tokens):
            joining.append(queue.popleft())
        seconds += LINEAR.prefill_s(4, *alike(context for context, _ in joining))
        batch += joining
        seconds += LINEAR.step_s(4, len(batch), sum(context for context, _ in batch), 1)
        batch = [(context + 1, remaining - 1) for context, remaining in batch if remaining > 1]
        left = len(batch) + len(queue)
        starts = left < before
        if left and any(left <= stop < before for stop in stops):
            seen.append((seconds, sorted(batch), list(queue)))
    return [*seen, (seconds, [], [])]


def held(works: list[Work]) -> int:
    return sum(context for context, _ in works)


def fits(works: list[Work], slots: int, cache_tokens: float) -> bool:
    """Whether these run together, each with a token to grow."""
    return len(works) == 1 or (len(works) <= slots and held(works) + len(works) <= cache_tokens)


def seen_of(state: Drained) -> tuple[Any, list[Work], list[Work]]:
    """The state in the form of `step_by_step`, with seconds up to rounding."""
    (running,) = state.replicas
    return pytest.approx(state.seconds), sorted(running), state.waiting


@given(RUNNING, RUNNING, st.integers(6, 8))
def test_events_give_the_same_time_as_single_steps(running: list[Work], waiting: list[Work], slots: int) -> None:
    ((seconds, _, _),) = step_by_step(running, waiting, slots)
    assert drain_s(LINEAR, 4, [running], waiting, slots=slots) == pytest.approx(seconds)


@given(RUNNING, RUNNING, st.integers(6, 8), st.integers(50, 2000))
def test_a_full_cache_sends_away_the_sequence_that_started_last(
    running: list[Work], waiting: list[Work], slots: int, cache_tokens: int
) -> None:
    kept = next(n for n in range(len(running), -1, -1) if n < 2 or fits(running[:n], slots, cache_tokens))
    *_, (seconds, _, _) = step_by_step(running[:kept], [*running[kept:], *waiting], slots, (), cache_tokens)
    (end,) = drain(LINEAR, 4, [running], waiting, slots=slots, cache_tokens=cache_tokens)
    assert end.seconds == pytest.approx(seconds, rel=0.02)


def test_what_a_full_cache_sends_away_is_computed_again_when_there_is_room() -> None:
    # 12 ms steps of both until 40 tokens are held, 5 each; 10 of 11 ms of the first; 15 tokens again; 15 of 11 ms
    (end,) = drain(predictor(), 2, [[(20, 15), (10, 20)]], [], slots=4, cache_tokens=40)
    assert end.seconds == pytest.approx(5 * 0.008 + 10 * 0.007 + 0.015 + 15 * 0.007)


def test_a_prompt_that_a_group_shares_is_held_and_computed_once() -> None:
    # 15 tokens of the group's 20 are its prompt: 25 are held, and 10 more by the end, of 12 ms steps
    running: list[Held] = [((20, 5), 5), ((20, 5), 20)]
    (fits,) = drain_held(predictor(), 2, [running], [], slots=4, cache_tokens=35)
    assert fits.seconds == pytest.approx(5 * 0.008)
    # with room for 4 steps the one that started last goes, and computes the 9 tokens again that it alone held
    (short,) = drain_held(predictor(), 2, [running[::-1]], [], slots=4, cache_tokens=33)
    assert short.seconds == pytest.approx(4 * 0.008 + 0.007 + 0.009 + 0.007)
    (waited,) = drain_held(predictor(), 2, [[]], running, slots=4)
    assert waited.seconds == pytest.approx(0.025 + 5 * 0.008)


def test_an_idle_replica_takes_what_another_has_no_cache_for() -> None:
    # as above, but the second replica computes the 15 tokens again at once, and goes on beside the first
    (end,) = drain(predictor(), 1, [[(20, 15), (10, 20)], []], [], slots=4, cache_tokens=40)
    assert end.seconds == pytest.approx(5 * 0.012 + 0.015 + 15 * 0.011)


@given(st.lists(st.lists(WORK, max_size=4), min_size=3, max_size=3), st.lists(WORK, max_size=4), st.integers(1, 900))
def test_with_any_cache_all_sequences_end(replicas: list[list[Work]], waiting: list[Work], cache_tokens: int) -> None:
    total = sum(map(len, replicas)) + len(waiting)
    states = drain(LINEAR, 1, replicas, waiting, slots=3, cache_tokens=cache_tokens, stops=range(1, total))
    assert all(before.unfinished > after.unfinished for before, after in itertools.pairwise(states))
    assert states[-1].unfinished == 0
    assert states[-1].seconds >= drain_s(LINEAR, 1, replicas, [], slots=10) * (not waiting) * 0.5


@given(st.lists(RUNNING, min_size=4, max_size=4), st.integers(0, 3), WORK)
def test_another_sequence_never_takes_less_time(replicas: list[list[Work]], index: int, work: Work) -> None:
    more = [[*running, work] if place == index else running for place, running in enumerate(replicas)]
    assert drain_s(LINEAR, 1, more, [], slots=8) >= drain_s(LINEAR, 1, replicas, [], slots=8) - 1e-9


@given(st.lists(RUNNING.filter(bool), min_size=2, max_size=2), st.integers(1, 20))
def test_longer_sequences_never_take_less_time(replicas: list[list[Work]], longer: int) -> None:
    first, *others = replicas[0]
    more = [[(first[0], first[1] + longer), *others], replicas[1]]
    assert drain_s(LINEAR, 2, more, [], slots=8) >= drain_s(LINEAR, 2, replicas, [], slots=8) - 1e-9


@given(st.lists(RUNNING, min_size=4, max_size=4), RUNNING, st.integers(1, 6))
def test_it_takes_no_less_than_any_sequence_alone(replicas: list[list[Work]], waiting: list[Work], slots: int) -> None:
    alone = [drain_s(LINEAR, 1, [[work]], [], slots=1) for running in [*replicas, waiting] for work in running]
    assert drain_s(LINEAR, 1, replicas, waiting, slots=slots) >= max(alone, default=0.0) - 1e-9


@given(RUNNING, RUNNING, st.integers(6, 8), st.sets(st.integers(1, 12)))
def test_every_stop_that_is_crossed_has_the_state_that_single_steps_give(
    running: list[Work], waiting: list[Work], slots: int, stops: set[int]
) -> None:
    stops = {stop for stop in stops if stop < len(running) + len(waiting)}
    states = drain(LINEAR, 4, [running], waiting, slots=slots, stops=stops)
    assert [seen_of(state) for state in states] == step_by_step(running, waiting, slots, stops)


@given(RUNNING, RUNNING, st.integers(6, 8), st.sets(st.integers(1, 12), min_size=1))
def test_what_is_left_on_the_way_takes_the_rest_of_the_time(
    running: list[Work], waiting: list[Work], slots: int, stops: set[int]
) -> None:
    total = len(running) + len(waiting)
    stops = {stop for stop in stops if stop < total}
    *states, end = drain(LINEAR, 4, [running], waiting, slots=slots, stops=stops)
    for state in states:
        rest_s = drain_s(LINEAR, 4, state.replicas, state.waiting, slots=slots)
        assert state.seconds + rest_s == pytest.approx(end.seconds)


def test_a_state_on_the_way_is_the_engine_then() -> None:
    # 4 steps of 12 ms; the one that is left has 6 tokens to make then
    state, _ = drain(predictor(), 1, [[(5, 10), (5, 4)], []], [], slots=4, stops={1})
    assert state.seconds == pytest.approx(0.048)
    assert state.replicas == [[(9, 6)], []]


def test_a_replica_in_the_middle_of_a_step_has_that_step_still_to_make() -> None:
    # sizes 1 and 2 take 20 and 30 ms beside each other. At 30 ms the second has ended both of its sequences, and the
    # first is in the middle of its second step: 1 of its 4 tokens is made. 1.5 + 1 steps of 10 ms alone are left
    contended = LatencyPredictor(made_profile(lambda tp, size, tokens, replicas: 0.01 * size + 0.01 * (replicas - 1)))
    running: list[list[Work]] = [[(5, 4)], [(7, 1), (9, 1)]]
    state, end = drain(contended, 1, running, [], slots=4, stops={1})
    assert state.seconds == pytest.approx(0.03)
    assert state.replicas == [[(6, 3)], []]
    assert state.waiting == []
    assert end.seconds == pytest.approx(0.03 + 2.5 * 0.01)


def test_a_replica_that_prefills_at_a_stop_has_all_its_tokens_still_to_make() -> None:
    # steps of 11 ms. The second replica prefills from 11 to 61 ms, and the first ends its sequence at 33 ms
    running: list[list[Work]] = [[(100, 3)], [(5, 1)]]
    state, end = drain(predictor(), 1, running, [(50, 2), (30, 1)], slots=1, stops={2})
    assert state.seconds == pytest.approx(0.033)
    assert state.replicas == [[], [(50, 2)]]
    assert state.waiting == [(30, 1)]
    assert end.seconds == pytest.approx(0.061 + 2 * 0.011)


@pytest.mark.parametrize("step_s", [0.01, 0.007, 0.0123])
def test_steps_that_are_done_at_a_stop_are_whole_whatever_rounding_makes_of_them(step_s: float) -> None:
    """All replicas take the same time for a step, and none slows another down, so all make their tokens together."""
    profile = LatencyPredictor(made_profile(lambda *_: step_s, ranks=4, degrees=(1, 2)))
    for first in range(1, 60):
        running: list[list[Work]] = [[(5, 200)], [(7, first + 30)], [(9, first)], []]
        one, two, _ = drain(profile, 1, running, [], slots=1, stops={1, 2})
        assert one.replicas == [[(5 + first, 200 - first)], [(7 + first, 30)], [], []]
        assert two.replicas == [[(35 + first, 170 - first)], [], [], []]


def test_looking_on_the_way_changes_nothing() -> None:
    running: list[list[Work]] = [[(100, 40), (7, 3)], [(50, 20), (9, 31)]]
    looked = drain(LINEAR, 2, running, [(5, 30)], slots=2, stops={1, 2, 3, 4})
    assert looked[-1].seconds == pytest.approx(drain_s(LINEAR, 2, running, [(5, 30)], slots=2))
