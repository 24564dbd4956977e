"""Claims on how many groups one claim of a trainer hands out."""

from collections.abc import Sequence

import pytest

from tailrace.planning.claims import Claim


def gathered(groups: Sequence[tuple[int, int]], *, tokens: int | None = None, rows: int | None = None) -> int | None:
    """The number of groups of (tokens, rows) in the first claim; None while it is not complete."""
    claim = Claim(tokens=tokens, rows=rows)
    for number, group in enumerate(groups):
        if not claim.fits(*group):
            return number
        claim.add(*group)
        if claim.is_complete:
            return number + 1
    return None


@pytest.mark.parametrize(
    ("groups", "bounds", "number"),
    [
        ([(4, 1), (4, 1), (4, 1)], {"tokens": 10}, 2),
        ([(4, 1), (6, 1), (4, 1)], {"tokens": 10}, 2),
        ([(40, 1), (1, 1)], {"tokens": 10}, 1),
        ([(4, 1), (4, 1)], {"tokens": 10}, None),
        ([(4, 2), (4, 2), (4, 2)], {"rows": 5}, 2),
        ([(4, 2), (4, 2)], {"tokens": 10, "rows": 4}, 2),
    ],
)
def test_a_claim_is_complete_at_its_bound_or_before_a_group_over_it(
    groups: Sequence[tuple[int, int]], bounds: dict[str, int], number: int | None
) -> None:
    assert gathered(groups, **bounds) == number
