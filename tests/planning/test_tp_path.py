"""Paths of several switches, against all paths that there are."""

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.planning.curves import Floats
from tailrace.planning.tp_path import Path, Paths

DEGREES = (1, 2, 4)


def degrees_of(path: Path, first: int, at: Sequence[int]) -> list[int]:
    """The index of the path's degree from each moment on."""
    changes = {unfinished: DEGREES.index(tp) for tp, unfinished in path.later}
    return list(itertools.accumulate(at[1:], lambda degree, number: changes.get(number, degree), initial=first))


def sum_of(
    way: Sequence[int], seconds: Sequence[float], run_s: list[list[float]], switch_s: list[list[list[float]]]
) -> tuple[float, int]:
    """Seconds and switches of the way with such a degree, by its index, from each moment on.

    `seconds`: until each moment, with the first degree.
    """
    switches = [moment for moment in range(1, len(way)) if way[moment] != way[moment - 1]]
    left = switches[0] if switches else len(way)
    total = seconds[left] + sum(run_s[moment][way[moment]] for moment in range(left, len(way)))
    return total + sum(switch_s[m][way[m - 1]][way[m]] for m in switches), len(switches)


TIMES = st.integers(0, 50).map(float)


@given(st.integers(1, 5), st.integers(0, 20).map(float), st.data())
def test_no_path_costs_less(moments: int, margin_s: float, data: st.DataObject) -> None:
    row = st.lists(TIMES, min_size=3, max_size=3)
    table = st.lists(row, min_size=3, max_size=3)
    run_s = data.draw(st.lists(row, min_size=moments, max_size=moments))
    switch_s = data.draw(st.lists(table, min_size=moments, max_size=moments))
    end_s = data.draw(row)
    at = list(range(moments, 0, -1))
    found = Paths(DEGREES, at, np.array(run_s), np.array(switch_s), np.array(end_s), margin_s=margin_s)
    for first in range(3):
        alone = [0.0, *itertools.accumulate(data.draw(st.lists(TIMES, min_size=moments, max_size=moments)))]
        path = found.path(DEGREES[first], np.array(alone), np.ones(moments))
        least = min(
            seconds + margin_s * switches + end_s[way[-1]]
            for way in itertools.product([first], *[range(3)] * (moments - 1))
            for seconds, switches in [sum_of(way, alone, run_s, switch_s)]
        )
        last = DEGREES.index(path.later[-1][0]) if path.later else first
        assert abs(path.seconds + margin_s * len(path.later) + end_s[last] - least) < 1e-6
        assert path.seconds == pytest.approx(sum_of(degrees_of(path, first, at), alone, run_s, switch_s)[0])


@given(st.integers(1, 5), st.integers(0, 20).map(float), st.data())
def test_a_path_is_taken_only_if_by_its_own_seconds_it_costs_less(
    moments: int, margin_s: float, data: st.DataObject
) -> None:
    row = st.lists(TIMES, min_size=3, max_size=3)
    table = st.lists(row, min_size=3, max_size=3)
    run_s = np.array(data.draw(st.lists(row, min_size=moments, max_size=moments)))
    switch_s = np.array(data.draw(st.lists(table, min_size=moments, max_size=moments)))
    end_s = data.draw(row)
    found = Paths(DEGREES, list(range(moments, 0, -1)), run_s, switch_s, np.array(end_s), margin_s=margin_s)
    alone = [0.0, *itertools.accumulate(data.draw(st.lists(TIMES, min_size=moments, max_size=moments)))]
    stretch = data.draw(st.lists(st.sampled_from([1e-6, 0.1, 3.0]), min_size=moments, max_size=moments))
    path = found.path(DEGREES[0], np.array(alone), np.array(stretch))
    last = DEGREES.index(path.later[-1][0]) if path.later else 0
    costs = path.seconds + margin_s * len(path.later) + end_s[last]
    assert costs <= alone[-1] + end_s[0] + 1e-6


def flat(run_s: Floats) -> Paths:
    return Paths(DEGREES, [3, 2, 1], run_s, np.zeros((3, 3, 3)), np.zeros(3), margin_s=0.0)


def test_where_nothing_is_gained_it_stays() -> None:
    assert flat(np.ones((3, 3))).path(2, np.arange(4.0), np.ones(3)) == Path(3.0, ())


def test_a_degree_without_room_for_all_is_entered_when_there_is_room() -> None:
    run_s = np.array([[2.0, np.inf, 2.0], [2.0, np.inf, 2.0], [2.0, 1.0, 2.0]])
    assert flat(run_s).path(1, np.arange(0.0, 8.0, 2.0), np.ones(3)) == Path(5.0, ((2, 1),))


def test_what_is_left_takes_longer_and_the_end_costs_as_much() -> None:
    run_s = np.array([[2.0, 2.0], [1.0, 0.2]])
    found = Paths((1, 2), [2, 1], run_s, np.full((2, 2, 2), 0.5), np.array([0.0, 1.0]), margin_s=0.0)
    # 5.5 s with its end instead of 12
    assert found.path(1, np.array([0.0, 2.0, 12.0]), np.array([1.0, 10.0])) == Path(2 + 0.5 + 10 * 0.2, ((2, 1),))
    # with nothing left to do, a switch and its end pay as little as ever
    assert found.path(1, np.array([0.0, 2.0, 2.1]), np.array([1.0, 1e-6])) == Path(2.1, ())


def test_after_a_wait_what_is_left_takes_longer() -> None:
    run_s = np.array([[2.0, 1.0, 2.0]] * 3)
    waited = flat(run_s).path(1, np.array([0.0, 4.0, 8.0, 12.0]), np.array([2.0, 2.0, 2.0]))
    assert waited == Path(4.0 + 2 * 2.0, ((2, 2),))
