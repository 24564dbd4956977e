"""Estimates of the tokens that unfinished responses will still make."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.errors import ConfigError
from tailrace.planning.remaining import (
    ESTIMATES,
    LengthHistory,
    Survival,
    Unfinished,
    make_estimate,
    survival_curve,
)


def history(*lengths: int) -> LengthHistory:
    kept = LengthHistory()
    for length in lengths:
        kept.add(length)
    return kept


def unfinished(generated: int, most: int, expected: float | None = None, *, trains: bool = True) -> Unfinished:
    return Unfinished(context=generated + 10, generated=generated, most=most, expected=expected, trains=trains)


SEQUENCES = st.lists(st.builds(unfinished, st.integers(0, 60), st.integers(1, 60)), max_size=12)
LENGTHS = st.lists(st.integers(1, 80), max_size=20)


def test_the_bound_is_the_maximum() -> None:
    assert make_estimate("bound", history(1, 2)).remaining([unfinished(3, 7), unfinished(0, 9)]) == [7, 9]


def test_ranked_takes_what_was_expected_off_what_was_made_within_one_and_the_maximum() -> None:
    sequences = [unfinished(30, 70, 50.4), unfinished(60, 40, 50), unfinished(10, 90, 500), unfinished(10, 90)]
    assert make_estimate("ranked", history()).remaining(sequences) == [20, 1, 90, 90]


def test_the_survival_curve_counts_unfinished_ones_as_longer() -> None:
    # at risk: 5 at length 2 (4 finished, 1 that has 3), then 3, 2 and 1
    curve = survival_curve(np.array([2, 4, 6, 8]), np.array([3]), upto=9)
    expected = [1, 1, 4 / 5, 4 / 5, 8 / 15, 8 / 15, 4 / 15, 4 / 15, 0, 0]
    assert curve == pytest.approx(expected)


def test_the_survival_curve_is_flat_beyond_the_longest_finished_length() -> None:
    curve = survival_curve(np.array([2, 100]), np.array([5, 5]), upto=7)
    assert curve == pytest.approx([1, 1, 3 / 4, 3 / 4, 3 / 4, 3 / 4, 3 / 4, 3 / 4])


def test_a_single_one_makes_its_median() -> None:
    # from 3 tokens on, 2/3 are longer than 4, 1/3 longer than 6: below a half after 3 more
    assert Survival(history(2, 4, 6, 8)).remaining([unfinished(3, 90)]) == [3]


def test_equal_ones_drain_as_their_number_is_expected_to_fall() -> None:
    # n(t) is 3 at first, 2 after 1 token, 1 after 3, 0 after 5; it falls below 2.5, 1.5 and 0.5 there
    assert Survival(history(2, 4, 6, 8)).remaining([unfinished(3, 90)] * 3) == [1, 3, 5]


def test_one_that_outlived_all_that_finished_reaches_its_maximum() -> None:
    assert Survival(history(2, 4, 6, 8)).remaining([unfinished(10, 17)]) == [17]
    assert Survival(history()).remaining([unfinished(0, 5), unfinished(9, 6)]) == [5, 6]


def test_those_that_outlived_the_longest_count_as_active_until_their_maximum() -> None:
    # with 3 and 10 tokens made, 6, 4, 3 and 2 are at risk at the four lengths; the first goes on with probability 3/4
    # after 1 token, 1/2 after 3, 1/4 after 5 and on; the second for sure until its maximum of 5. So n(t) is 1.75, 1.5,
    # then 0.25 from 5 on, where it falls below both 1.5 and 0.5.
    assert Survival(history(2, 4, 6, 8)).remaining([unfinished(3, 20), unfinished(10, 5)]) == [5, 5]


def test_those_that_are_expected_to_make_less_end_first() -> None:
    lengths = history(*range(10, 110, 10))
    few, many = Survival(lengths).remaining([unfinished(95, 400), unfinished(5, 400)])
    assert few < many


@given(SEQUENCES, LENGTHS, st.sampled_from(ESTIMATES))
def test_every_estimate_is_between_one_and_the_bound(
    sequences: list[Unfinished], lengths: list[int], name: str
) -> None:
    estimated = make_estimate(name, history(*lengths)).remaining(sequences)
    assert len(estimated) == len(sequences)
    assert all(1 <= tokens <= s.most for tokens, s in zip(estimated, sequences, strict=True))


@given(LENGTHS.filter(bool))
def test_fresh_ones_drain_as_those_before_them_did(lengths: list[int]) -> None:
    # as many as finished before, none of them begun: the ends are those lengths themselves
    ends = Survival(history(*lengths)).remaining([unfinished(0, 1000)] * len(lengths))
    assert ends == sorted(lengths)


def test_only_the_last_lengths_are_kept() -> None:
    kept = LengthHistory(window=3)
    for length in range(5):
        kept.add(length)
    assert len(kept) == 3
    assert list(kept.lengths()) == [2, 3, 4]


def test_an_estimate_sees_lengths_that_come_later() -> None:
    lengths = history()
    estimate = make_estimate("survival", lengths)
    assert estimate.remaining([unfinished(0, 50)]) == [50]
    lengths.add(7)
    assert estimate.remaining([unfinished(0, 50)]) == [7]


def test_responses_that_are_not_trained_on_have_a_curve_of_their_own() -> None:
    trained, evaluated = history(*[40] * 8), history(*[7] * 8)
    estimate = make_estimate("survival", trained, evaluated)
    greedy = unfinished(0, 50, trains=False)
    assert estimate.remaining([unfinished(0, 50), greedy, unfinished(30, 20), greedy]) == [40, 7, 10, 7]


def test_lengths_of_the_other_kind_count_until_there_are_enough() -> None:
    trained, evaluated = history(*[40] * 8), history(*[7] * 7)
    estimate = make_estimate("survival", trained, evaluated)
    assert estimate.remaining([unfinished(0, 50, trains=False)]) == [40]
    evaluated.add(7)
    assert estimate.remaining([unfinished(0, 50, trains=False)]) == [7]
    first = make_estimate("survival", history(), evaluated)
    assert first.ready
    assert first.remaining([unfinished(0, 50)]) == [7]


def test_the_survival_curve_is_relied_on_once_some_lengths_were_seen() -> None:
    history = LengthHistory()
    estimate = make_estimate("survival", history)
    seen = []
    for tokens in range(10):
        seen.append(estimate.ready)
        history.add(tokens + 1)
    assert seen == [False] * 8 + [True] * 2
    assert make_estimate("bound", LengthHistory()).ready
    assert make_estimate("ranked", LengthHistory()).ready


def test_an_unknown_estimate_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"'survivel' is no estimate .* bound, survival, ranked; did you mean 'surv"):
        make_estimate("survivel", history())
