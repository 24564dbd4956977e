"""How far a prompt is from the mean, by hand and against what lengths were drawn with."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.planning.lengths.base import Asked, Expectation, Finished
from tailrace.planning.lengths.effects import Effects, Normal
from tailrace.planning.lengths.history import History, Siblings


def filled(*responses: tuple[str, float, int], discount: float = 1.0) -> Effects:
    effects = Effects(discount=discount)
    for prompt, value, version in responses:
        effects.add(prompt, value, version)
    return effects


def test_two_prompts_with_two_responses_each() -> None:
    effects = filled(("a", 1, 0), ("a", 3, 0), ("b", 5, 0), ("b", 7, 0))
    # within: (2 + 2) / 2 = 2; between: (16 - 2) / (4 - 8 / 4) = 7; a: 4 + 14 / 16 · (2 - 4), 2 + 7 / 8
    assert effects.expect("a") == pytest.approx(Normal(2.25, math.sqrt(2.875)))
    assert effects.expect("b") == pytest.approx(Normal(5.75, math.sqrt(2.875)))
    assert effects.expect("new") == pytest.approx(Normal(4, 3))
    assert effects.prompt_share == pytest.approx(7 / 9)


def test_prompts_that_are_alike_are_hardly_told_apart() -> None:
    effects = filled(("a", 1, 0), ("a", 5, 0), ("b", 2, 0), ("b", 4.5, 0))
    assert effects.prompt_share == pytest.approx(0.02)
    one, other = effects.expect("a"), effects.expect("b")
    assert one is not None
    assert other is not None
    assert 0 < other.mean - one.mean < 0.05 * 0.25


def test_one_response_a_prompt_tells_a_tenth_of_the_distance() -> None:
    # both variances are 4: 0.4 between and 3.6 within
    assert filled(("a", 1, 0), ("b", 5, 0)).expect("a") == pytest.approx(Normal(2.8, math.sqrt(3.6 + 0.4 * 0.9)))


def test_where_nothing_is_known_nothing_is_expected() -> None:
    assert Effects().expect("a") is None


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 10), st.integers(0, 5)), min_size=1, max_size=20),
    st.floats(0.5, 1.0),
)
def test_the_order_in_which_responses_come_changes_nothing(
    responses: list[tuple[str, float, int]], discount: float
) -> None:
    one = filled(*responses, discount=discount)
    other = filled(*sorted(responses, key=lambda response: response[2]), discount=discount)
    for prompt in "abc":
        mine, theirs = one.expect(prompt), other.expect(prompt)
        assert mine is not None
        assert theirs is not None
        assert mine.mean == pytest.approx(theirs.mean, abs=1e-6)


def test_newer_responses_count_more() -> None:
    old, new = [("a", 1.0, 0)] * 10, [("a", 5.0, 10)] * 10
    others = [("b", 3.0 + shift, 10) for shift in (-0.5, 0.5)] * 5
    even = filled(*old, *new, *others).expect("a")
    recent = filled(*old, *new, *others, discount=0.5).expect("a")
    assert even is not None
    assert recent is not None
    assert even.mean == pytest.approx(3, abs=0.1)
    assert recent.mean > 4.5


@pytest.mark.parametrize("discount", [0.0, 1.1, -1.0])
def test_a_discount_that_is_none_is_refused(discount: float) -> None:
    with pytest.raises(ValueError, match="give a number above 0, and at most 1"):
        Effects(discount=discount)


def drawn(chance: random.Random, prompts: int, each: int, *, between: float, within: float) -> list[Finished]:
    """Responses whose log-lengths have these deviations."""
    found = []
    for number in range(prompts):
        own = chance.gauss(6, between)
        asked = Asked(prompt_id=str(number), prompt_tokens=10)
        found += [
            Finished(asked=asked, tokens=max(1, round(math.exp(chance.gauss(own, within)))), version=0)
            for _ in range(each)
        ]
    return found


def test_the_variances_and_the_interval_are_those_that_lengths_are_drawn_with() -> None:
    chance = random.Random(0)
    responses = drawn(chance, 400, 5, between=0.6, within=0.8)
    known, new = [r for i, r in enumerate(responses) if i % 5], responses[::5]
    predictor = History(discount=1.0)
    predictor.learn(known)
    assert predictor._effects.prompt_share == pytest.approx(0.36, abs=0.06)
    expected = predictor.expect([response.asked for response in new])
    inside = sum(each.low <= response.tokens <= each.high for each, response in zip(expected, new, strict=True))
    assert inside / len(new) == pytest.approx(0.8, abs=0.06)


def test_history_knows_nothing_of_a_first_prompt() -> None:
    one, other = History().expect([Asked(prompt_id="a", prompt_tokens=5), Asked(prompt_id="b", prompt_tokens=500)])
    assert one == other
    assert isinstance(one, Expectation)
    assert one.low < one.tokens < one.high


def test_the_first_sample_of_a_group_tells_the_length_of_the_others() -> None:
    chance = random.Random(1)
    before, group = drawn(chance, 100, 4, between=1.0, within=0.3), drawn(chance, 2, 1, between=0.0, within=0.0)
    long, short = (
        Finished(asked=Asked(prompt_id=name, prompt_tokens=9), tokens=tokens, version=1)
        for name, tokens in (("long", 4000), ("short", 40))
    )
    predictor = Siblings()
    predictor.learn([*before, *group])
    one, other = predictor.expect([long.asked, short.asked])
    assert one == other
    predictor.learn([long, short])
    one, other = predictor.expect([long.asked, short.asked])
    assert other.tokens * 20 < one.tokens < 4000, "nearer to the mean of all than the one response was"
