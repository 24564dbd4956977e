"""Advantages, losses and their gradients are those of verl, an independent implementation."""

from collections.abc import Callable
from types import ModuleType

import pytest
import torch

from tests.helpers.responses import MODES, Responses, random_responses
from tests.oracle.entries import ENTRIES
from tests.oracle.entry import BAR, CASES, Agreement, Entry, compare


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_values_and_gradients_are_those_of_verl(
    entry: Entry, verl: ModuleType, record: Callable[[Entry, Agreement], None]
) -> None:
    found = compare(entry, verl)
    record(entry, found)
    worst = f"case {found.worst} differs most; known differences: {entry.differs or 'none'}"
    assert found.value <= BAR, worst
    assert found.gradient is None or found.gradient <= BAR, worst


def doubled(responses: Responses) -> torch.Tensor:
    return responses.log_probs_BR * 2


def compared(verls: Callable[[Responses], torch.Tensor]) -> Agreement:
    """Compare `doubled` with another function."""
    entry = Entry(name="doubled", ours=doubled, verls=lambda _, responses: verls(responses))
    return compare(entry, torch, cases=6)


def test_equal_functions_do_not_differ() -> None:
    found = compared(doubled)
    assert (found.cases, found.value, found.gradient) == (6, 0, 0)


def test_values_alone_may_differ() -> None:
    found = compared(lambda responses: doubled(responses) + 1)
    assert found.value == pytest.approx(1)
    assert found.gradient == 0


def test_gradients_alone_may_differ() -> None:
    found = compared(lambda responses: doubled(responses).detach() + responses.log_probs_BR * 0)
    assert (found.value, found.gradient) == (0, 2)


def test_what_is_not_a_number_is_within_no_bar() -> None:
    found = compared(lambda responses: doubled(responses) * float("nan"))
    assert not found.value <= BAR


def test_a_gradient_that_only_one_has_is_a_difference() -> None:
    with pytest.raises(AssertionError, match="only ours has a gradient"):
        compared(lambda responses: doubled(responses).detach())


def test_values_of_different_shapes_are_not_compared() -> None:
    with pytest.raises(AssertionError, match=r"of verl's \[\]"):
        compared(lambda responses: doubled(responses).sum())


def test_cases_have_holes_untrained_responses_groups_and_each_way_to_aggregate() -> None:
    cases = [random_responses(seed) for seed in range(CASES)]
    assert all(sum(case.mode == mode for case in cases) == 200 for mode in MODES)
    trained = [case.mask_BR.sum(1) > 0 for case in cases]
    holes = [case.is_token_BR & (case.mask_BR == 0) & rows[:, None] for case, rows in zip(cases, trained, strict=True)]
    assert sum(bool(each.any()) for each in holes) > CASES / 4
    assert sum(not each.all() for each in trained) > CASES / 4
    assert all(min(map(len, case.groups)) > 1 for case in cases)
