"""pass@k and maj@k against worked cases, and against all choices of k answers."""

from collections import Counter
from itertools import combinations
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.statistics.attempts import majority_at_k, pass_at_k, sizes

Votes = list[tuple[str, bool]]


def majority(votes: Votes) -> float:
    """How right the winners of one vote are, in the mean."""
    counts = Counter(answer for answer, _ in votes if answer)
    if not counts:
        return 0.0
    winners = [answer for answer, count in counts.items() if count == max(counts.values())]
    return fmean(fmean(right for answer, right in votes if answer == winner) for winner in winners)


@pytest.mark.parametrize(
    ("votes", "k", "expected"),
    [
        ("7+ 7+ 5-", 3, 1),
        ("7+ 5- 5-", 3, 0),
        ("7+ 5-", 2, 1 / 2),  # a tie
        ("7+ 5- 3-", 3, 1 / 3),
        ("7+ 7+ 5-", 2, (1 + 1 / 2 + 1 / 2) / 3),  # 77, 75, 75
        ("7+ 7+ 5- 5-", 3, 2 / 4),  # 775, 775, 755, 755
        ("7+ 7+ 7+ 5- 5-", 3, (1 + 2 * 3 * 1) / 10),  # 777, then six of 775, then three of 755
        ("7+ - -", 3, 1),  # a response without an answer does not vote
        ("- - -", 3, 0),
        ("- - 7+", 2, 2 / 3),
        ("7+", 1, 1),
    ],
)
def test_maj_at_k_of_worked_cases(votes: str, k: int, expected: float) -> None:
    assert majority_at_k([(vote[:-1], vote[-1] == "+") for vote in votes.split()], k) == pytest.approx(expected)


some_votes = st.lists(st.tuples(st.sampled_from(["", "1", "2", "3", "4"]), st.booleans()), min_size=1, max_size=9)


def consistent(votes: Votes) -> Votes:
    """The votes, where all who give an answer are as right as the first; one without an answer is wrong."""
    first: dict[str, bool] = {"": False}
    return [(answer, first.setdefault(answer, right)) for answer, right in votes]


@given(some_votes, st.data())
def test_maj_at_k_is_the_mean_over_all_choices(votes: Votes, data: st.DataObject) -> None:
    votes = consistent(votes)
    k = data.draw(st.integers(1, len(votes)))
    assert majority_at_k(votes, k) == pytest.approx(fmean(majority(list(chosen)) for chosen in combinations(votes, k)))


@given(some_votes)
def test_maj_at_k_holds_to_what_a_vote_must(votes: Votes) -> None:
    votes = consistent(votes)
    right = sum(right for _, right in votes)
    assert majority_at_k(votes, 1) == pytest.approx(right / len(votes))
    for k in range(1, len(votes) + 1):
        assert -1e-12 <= majority_at_k(votes, k) <= pass_at_k(len(votes), right, k) + 1e-12
        assert majority_at_k(votes, k) == pytest.approx(majority_at_k(votes[::-1], k))


def test_an_answer_that_graders_call_right_and_wrong_is_right_in_part() -> None:
    assert majority_at_k([("7", True), ("7", False), ("5", False)], 3) == 1 / 2


def test_maj_at_k_of_many_answers_is_a_number() -> None:
    votes = [("7", True)] * 30_000 + [("5", False)] * 20_000 + [(str(k), False) for k in range(100, 200)]
    assert 0.9 < majority_at_k(votes, 64) < 0.95
    assert majority_at_k(votes, len(votes)) == 1


@pytest.mark.parametrize(("count", "right"), [(1, 0), (1, 1), (5, 2), (7, 6), (8, 0), (8, 8)])
def test_pass_at_k_is_the_share_of_all_choices_with_a_right_answer(count: int, right: int) -> None:
    answers = [True] * right + [False] * (count - right)
    for k in range(1, count + 1):
        assert pass_at_k(count, right, k) == pytest.approx(fmean(any(chosen) for chosen in combinations(answers, k)))


@given(st.integers(1, 60), st.data())
def test_pass_at_k_grows_from_the_accuracy(count: int, data: st.DataObject) -> None:
    right = data.draw(st.integers(0, count))
    chances = [pass_at_k(count, right, k) for k in range(1, count + 1)]
    assert chances[0] == pytest.approx(right / count)
    assert chances == sorted(chances)
    assert chances[-1] == (right > 0)


@pytest.mark.parametrize(
    ("most", "expected"), [(0, []), (1, []), (2, [2]), (3, [2, 3]), (4, [2, 4]), (6, [2, 4, 6]), (8, [2, 4, 8])]
)
def test_the_sizes_are_powers_of_two_and_the_largest(most: int, expected: list[int]) -> None:
    assert sizes(most) == expected
