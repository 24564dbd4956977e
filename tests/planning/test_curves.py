"""Claims on functions between points."""

from hypothesis import given
from hypothesis import strategies as st

from tailrace.planning.curves import Curve, Surface

X = st.floats(0, 1e6)


def test_a_curve_goes_on_as_between_its_last_points_but_never_down() -> None:
    rising, falling = Curve.through([(0, 1), (10, 2)]), Curve.through([(0, 2), (10, 1)])
    assert rising.at(20) == 3
    assert falling.at(20) == 1
    assert rising.at(-20) == 0  # never below zero
    assert Curve.through([(5, 7)]).at(100) == 7


def test_a_surface_is_linear_between_two_sizes() -> None:
    surface = Surface.through({1: [(0, 1), (10, 2)], 3: [(0, 3), (10, 6)]})
    assert surface.at(2, 10) == 4
    assert surface.at(4, 10) == 8
    assert surface.at(0.5, 10) == 1


@given(st.lists(st.floats(0, 1e3), min_size=4, max_size=4), X, X)
def test_a_surface_of_rising_curves_rises(steps: list[float], first: float, second: float) -> None:
    surface = Surface.through(
        {1: [(1, 1), (9, 1 + steps[0]), (90, 1 + steps[0] + steps[1])], 8: [(2, 1), (50, 1 + steps[2])]}
    )
    low, high = sorted((first, second))
    assert surface.at(1 + steps[3], low) <= surface.at(1 + steps[3], high) * (1 + 1e-9)
