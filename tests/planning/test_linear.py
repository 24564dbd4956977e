"""The linear model of engines with jobs, beside the simulated engines."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.planning.dispatch.base import EngineState, Job
from tailrace.planning.dispatch.costs import StepCosts
from tailrace.planning.dispatch.linear import JobFigures, LinearModel
from tailrace.planning.dispatch.seconds import makespan_s

costs = st.builds(
    StepCosts,
    base=st.floats(0.1, 5),
    each=st.floats(0, 0.5),
    context=st.floats(0, 1e-3),
    prefill=st.floats(0, 0.1),
)
engines = st.builds(
    EngineState,
    name=st.just(""),
    times=costs,
    replicas=st.just(1),
    slots=st.just(64),
    cache_tokens=st.just(10**9),
    running=st.lists(st.tuples(st.integers(50, 300), st.integers(50, 300)), max_size=3),
)


@given(
    st.lists(engines, min_size=1, max_size=3),
    st.lists(st.tuples(st.integers(1, 4), st.integers(50, 500), st.integers(0, 2)), min_size=1, max_size=12),
)
def test_it_agrees_with_simulated_engines_that_begin_all_at_once(
    states: list[EngineState], given: list[tuple[int, int, int]]
) -> None:
    placed = [
        Job(group=number, samples=samples, prompt_tokens=100, expected_tokens=length)
        for number, (samples, length, _) in enumerate(given)
    ]
    places: list[list[int]] = [[] for _ in states]
    for number, (_, _, index) in enumerate(given):
        places[index % len(states)].append(number)
    figures = JobFigures.of(placed)
    found = LinearModel.of(states, figures).makespan_s(figures.of_lengths(figures.lengths[None]), places)
    assert found == pytest.approx(makespan_s(states, placed, places), rel=0.02)


def test_full_batches_bound_engines_whose_samples_wait() -> None:
    state = EngineState(name="", times=StepCosts(base=1, each=0, context=0, prefill=0), slots=4, cache_tokens=10**9)
    placed = [Job(group=number, samples=1, prompt_tokens=10, expected_tokens=100) for number in range(12)]
    figures = JobFigures.of(placed)
    drawn = figures.of_lengths(np.stack([figures.lengths, 2 * figures.lengths]))
    assert LinearModel.of([state], figures).makespan_s(drawn, [list(range(12))]).tolist() == [300, 600]
    assert makespan_s([state], placed, [list(range(12))]) == 300
    assert makespan_s([state], placed, [list(range(12))], lengths=[200] * 12) == 600
