"""What adapters have in common: they refuse what they do not play, and grade as several graders do."""

from typing import Any

import pytest
from adapter_jobs import check_plays, grading_s
from hypothesis import given
from hypothesis import strategies as st

HEADER = {"device": "cpu", "kl_coefficient": 0.0}


def groups(turns: int) -> list[dict[str, Any]]:
    return [{"samples": [{"turns": [{"generated_tokens": 3}] * turns}]}]


def test_what_an_adapter_does_not_play_ends_it_with_a_message() -> None:
    check_plays(HEADER, {**HEADER, "seed": 1}, groups(1))
    with pytest.raises(SystemExit, match=r"plays kl_coefficient 0\.0 alone, and the benchmark has 0\.1"):
        check_plays(HEADER, {**HEADER, "kl_coefficient": 0.1}, groups(1))
    with pytest.raises(SystemExit, match="plays device cpu alone, and the benchmark has cuda"):
        check_plays(HEADER, {**HEADER, "device": "cuda"}, groups(1))
    with pytest.raises(SystemExit, match="plays single turns, and the workload has conversations"):
        check_plays(HEADER, HEADER, groups(2))


def test_graders_share_the_samples() -> None:
    assert grading_s([3.0, 1.0, 1.0, 2.0], graders=2) == 4.0
    assert grading_s([], graders=2) == 0.0


@given(st.lists(st.floats(0, 100), min_size=1, max_size=20), st.integers(1, 30))
def test_grading_takes_as_long_as_the_longest_sample_and_no_longer_than_one_grader(
    seconds: list[float], graders: int
) -> None:
    assert max(seconds) <= grading_s(seconds, graders) <= sum(seconds) * (1 + 1e-9)
    assert grading_s(seconds, 1) == pytest.approx(sum(seconds))
    assert grading_s(seconds, len(seconds)) == max(seconds)
