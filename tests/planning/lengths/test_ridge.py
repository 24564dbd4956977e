"""The solution from sums is that of all rows, and its deviation that of prompts that were not learned."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.planning.lengths.ridge import Array, Ridge


def rows(seed: int, number: int, *, noise: float = 0.3, useless: int = 0) -> tuple[list[str], Array, Array]:
    """Prompts with two figures that matter, some that do not, and one that is the same for all."""
    chance = np.random.default_rng(seed)
    figures = np.column_stack([np.ones(number), chance.normal(size=(number, 2 + useless)), np.full(number, 7.0)])
    logs = 5 + figures[:, 1] - 0.5 * figures[:, 2] + noise * chance.normal(size=number)
    return [f"{seed}/{row}" for row in range(number)], figures, logs


def test_with_little_noise_the_coefficients_are_those_that_lengths_were_made_with() -> None:
    ridge = Ridge(4)
    ridge.learn(*rows(0, 400, noise=0.01), version=0)
    solution = ridge.solve()
    assert solution is not None
    assert solution.coefficients == pytest.approx([5, 1, -0.5, 0], abs=0.01)
    assert solution.deviation == pytest.approx(0.01, rel=0.3)
    assert solution.mean == pytest.approx(5, abs=0.2)


def test_the_unit_of_a_figure_does_not_matter() -> None:
    ids, figures, logs = rows(0, 200)
    known = []
    for unit in (1.0, 1e-7, 1e6):
        ridge = Ridge(4)
        ridge.learn(ids, figures * [1.0, unit, 1.0, 1.0], logs, version=0)
        solution = ridge.solve()
        assert solution is not None
        known.append((solution.coefficients[1] * unit, solution.deviation))
    assert known[1] == pytest.approx(known[0])
    assert known[2] == pytest.approx(known[0])


def test_a_rare_figure_of_a_table_moves_expectations_less_than_a_frequent_one() -> None:
    figures = np.zeros((400, 3))
    figures[:, 0] = 1
    figures[:200, 1] = 1
    figures[200:204, 2] = 1
    logs = 5 + figures[:, 1] + figures[:, 2] + np.random.default_rng(0).normal(size=400)
    names = [str(row) for row in range(400)]
    found = []
    for tables in ((), (range(1, 3),)):
        ridge = Ridge(3, tables=tables)
        ridge.learn(names, figures, logs, version=0)
        solution = ridge.solve()
        assert solution is not None
        found.append(solution.coefficients)
    alone, together = found
    assert together[1] == pytest.approx(1, abs=0.3)
    assert 0 < together[2] < 0.5 * alone[2]


def test_a_figure_of_a_table_that_no_prompt_had_changes_nothing() -> None:
    ids, figures, logs = rows(0, 50)
    ridge = Ridge(6, tables=[range(4, 6)])
    ridge.learn(ids, np.column_stack([figures, np.zeros((50, 2))]), logs, version=0)
    solution = ridge.solve()
    assert solution is not None
    assert solution.coefficients[4:].tolist() == [0, 0]


def test_the_deviation_is_that_of_other_prompts_however_many_figures_there_are() -> None:
    ridge = Ridge(104)
    ridge.learn(*rows(0, 150, noise=1.0, useless=100), version=0)
    solution = ridge.solve()
    _, figures, logs = rows(1, 2000, noise=1.0, useless=100)
    assert solution is not None
    errors = logs - figures @ solution.coefficients
    assert solution.deviation == pytest.approx(float(np.sqrt(np.mean(errors**2))), rel=0.15)
    assert solution.deviation < solution.spread


@given(st.permutations(range(4)), st.floats(0.5, 1.0))
def test_the_order_of_versions_changes_nothing(order: list[int], discount: float) -> None:
    parts = [rows(version, 20) for version in range(4)]
    solutions = []
    for versions in (range(4), order):
        ridge = Ridge(4, discount=discount)
        for version in versions:
            ridge.learn(*parts[version], version=version)
        solutions.append(ridge.solve())
    one, other = solutions
    assert one is not None
    assert other is not None
    assert one.coefficients == pytest.approx(other.coefficients, rel=1e-6, abs=1e-6)
    assert one.deviation == pytest.approx(other.deviation, rel=1e-6)


def test_responses_to_one_prompt_tell_their_mean() -> None:
    ridge = Ridge(2)
    ridge.learn(["a", "a"], np.ones((2, 2)), np.array([1.0, 3.0]), 0)
    solution = ridge.solve()
    assert solution is not None
    assert (solution.mean, solution.spread, solution.deviation) == pytest.approx((2, 1, 1))
    assert np.ones(2) @ solution.coefficients == pytest.approx(2)


def test_nothing_is_known_before_the_first_response() -> None:
    assert Ridge(3).solve() is None


def test_another_one_goes_on_from_its_state() -> None:
    one, other = Ridge(4, discount=0.9), Ridge(4, discount=0.9)
    one.learn(*rows(0, 50), version=3)
    other.restore(one.state())
    for ridge in (one, other):
        ridge.learn(*rows(1, 50), version=5)
    assert one.state() == other.state()
    with pytest.raises(ValueError, match="it has learned of 4 figures a prompt; here are 5"):
        Ridge(5).restore(one.state())
