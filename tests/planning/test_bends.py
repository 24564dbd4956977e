"""Batch sizes at which steps bend, found by bisection."""

import random
from collections.abc import Callable, Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.planning.bends import Sweeps, bends_of, error_at, measure_bends
from tailrace.planning.latency import LatencyPredictor
from tailrace.planning.tp_profile import DecodePoint, TPProfile
from tests.planning.tp_profiles import made_profile

Seconds = Callable[[int], float]
TOLERANCE = 0.01


def searched(*functions: Seconds, largest: int = 64, most: int = 1000) -> tuple[Mapping[int, Sweeps], list[int]]:
    """What was measured, and the sizes that were kept."""
    found = measure_bends(
        lambda sizes: {size: [[f(size) for f in functions]] for size in sizes}, largest, tolerance=TOLERANCE, most=most
    )
    return found, bends_of(found, tolerance=TOLERANCE, most=most)


def errors(kept: Sequence[int], *functions: Seconds, largest: int = 64) -> list[float]:
    """The error of the lines at each batch size."""
    seconds = {size: [[f(size) for f in functions]] for size in range(1, largest + 1)}
    return [error_at(seconds, kept, size) for size in seconds]


def test_a_straight_line_needs_its_two_ends() -> None:
    assert searched(lambda size: 10 + size)[1] == [1, 64]


@pytest.mark.parametrize("bend", [5, 9, 13, 33, 50])
def test_a_kink_is_found_wherever_it_is(bend: int) -> None:
    def kinked(size: int) -> float:
        return 10 + max(0, size - bend)

    _, kept = searched(kinked)
    assert max(errors(kept, kinked)) <= 2 * TOLERANCE
    assert len(kept) <= 4


@pytest.mark.parametrize("bend", [5, 9, 13, 33, 50])
def test_a_step_is_kept_with_the_sizes_on_both_sides_of_it(bend: int) -> None:
    _, kept = searched(lambda size: 10.0 + 5 * (size >= bend))
    assert {bend - 1, bend} <= set(kept)


def test_the_decoder_of_the_benchmark_bends_at_six_where_powers_of_two_draw_a_line_from_four_to_sixteen() -> None:
    def step(size: int) -> float:
        return 11.0 + 1.4 * max(0, size - 6)

    powers = errors([1, 2, 4, 16, 32, 64], step)
    assert powers[6 - 1] == pytest.approx((14.0 / 12 * 2) / 11.0)
    _, kept = searched(step)
    assert max(errors(kept, step)) <= 2 * TOLERANCE


def test_the_line_of_every_arrangement_counts() -> None:
    one, other = (lambda size: 10.0 + 5 * (size > 5)), (lambda size: 10.0 + 5 * (size > 12))
    assert {5, 6, 12, 13} <= set(searched(one, other)[1])


def test_stairs_are_found_where_every_power_of_two_lies_on_one_line() -> None:
    def stairs(size: int) -> float:
        return 4.0 + -(-size // 4)

    _, kept = searched(stairs)
    assert max(errors(kept, stairs)) <= 2 * TOLERANCE


def test_a_bound_on_sizes_leaves_the_worst_bends() -> None:
    def step(size: int) -> float:
        return 10.0 + 8 * (size > 5) + 0.5 * (size > 40)

    assert set(searched(step, most=4)[1]) == {1, 5, 6, 64}


def test_the_search_ends_when_there_is_no_more_time() -> None:
    asked: list[Sequence[int]] = []

    def measured(sizes: Sequence[int]) -> dict[int, Sweeps]:
        asked.append(sizes)
        return {size: [[10.0 + -(-size // 2)]] for size in sizes}

    found = measure_bends(measured, 64, tolerance=TOLERANCE, most=1000, goes_on=lambda: len(asked) < 2)
    assert len(asked) == 2
    assert set(asked[0]) < set(asked[1]) == set(found)


@given(st.integers(1, 6))
def test_few_sizes_are_all_measured(largest: int) -> None:
    assert sorted(searched(lambda size: 1.0 + size * size, largest=largest)[0]) == list(range(1, largest + 1))


def swept(step: Seconds, *, drift: float, noise: float, sweeps: int = 5) -> list[int]:
    """The sizes that are kept of a machine that drifts between sweeps, and whose measurements differ."""
    chance = random.Random(0)

    def measured(sizes: Sequence[int]) -> dict[int, Sweeps]:
        paces = [1 + drift * chance.uniform(-1, 1) for _ in range(sweeps)]
        return {size: [[pace * step(size) * (1 + noise * chance.uniform(-1, 1))] for pace in paces] for size in sizes}

    found = measure_bends(measured, 64, tolerance=0.02, most=1000)
    return bends_of(found, tolerance=0.02, most=12)


def test_a_drift_between_sweeps_hides_no_bend_and_makes_none() -> None:
    assert swept(lambda size: 10.0 + size, drift=0.3, noise=0.0) == [1, 64]
    assert swept(lambda size: 10.0 + 0.5 * (size > 5), drift=0.3, noise=0.0) == [1, 5, 6, 64]


def test_noise_hides_no_bend_that_is_larger() -> None:
    kept = swept(lambda size: 10.0 + 2.0 * (size > 5) + 0.1 * size, drift=0.3, noise=0.03)
    assert {5, 6} <= set(kept)
    assert len(kept) <= 8


@st.composite
def steps(draw: st.DrawFn) -> Seconds:
    """Stairs of 4, 8, 16 or 32 rows, or up to two kinks anywhere, on a line."""
    base, slope = draw(st.floats(5, 20)), draw(st.floats(0, 1))
    if draw(st.booleans()):
        rows, rise = draw(st.sampled_from([4, 8, 16, 32])), draw(st.floats(0, 2))
        return lambda size: base + slope * size + rise * -(-size // rows)
    kinks = draw(st.lists(st.tuples(st.integers(1, 64), st.floats(0, 0.5)), max_size=2))
    return lambda size: base + slope * size + sum(more * max(0, size - at) for at, more in kinks)


@given(steps(), steps())
def test_a_predictor_of_the_sizes_that_were_kept_is_within_the_tolerance_at_every_size(
    one: Seconds, other: Seconds
) -> None:
    _, kept = searched(one, other)
    predictor = LatencyPredictor(profiled(kept, one, other))
    for size in range(1, 65):
        for tp, seconds in ((1, one), (2, other)):
            assert predictor.step_s(tp, size, 16 * size, 1) == pytest.approx(seconds(size), rel=2.1 * TOLERANCE)


def profiled(sizes: Sequence[int], one: Seconds, other: Seconds) -> TPProfile:
    points = [
        DecodePoint(tp=tp, replicas=1, batch_size=size, context_tokens=size * length, seconds=seconds(size))
        for tp, seconds in ((1, one), (2, other))
        for size in sizes
        for length in (16, 256)
    ]
    return made_profile(lambda *_: 1.0, decode=tuple(points))
