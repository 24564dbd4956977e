"""Regression on figures of the prompt finds what lengths depend on."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from scipy.stats import spearmanr

from tailrace.planning.lengths.base import Asked, Expectation, Finished, LengthPredictor
from tailrace.planning.lengths.features import Features
from tailrace.planning.lengths.hidden_states import HiddenStates
from tailrace.planning.lengths.lambdarank import Lambdarank
from tailrace.planning.lengths.text import TextFigures

HARD = ("integral", "proof", "graph")
EASY = ("sum", "word", "colour")


def prompt(chance: random.Random, number: int) -> tuple[Asked, float]:
    """A prompt, and the logarithm of its typical length: hard words and many tokens make it long."""
    words = [chance.choice(HARD + EASY) for _ in range(chance.randint(3, 30))]
    kind = chance.choice(["one", "two"])
    asked = Asked(prompt_id=str(number), prompt_tokens=2 * len(words), text=" ".join([*words, kind]))
    hard = sum(word in HARD for word in words) / len(words)
    return asked, 4 + 2 * hard + 0.3 * math.log(len(words)) + (0.5 if kind == "two" else 0.0)


def responses(chance: random.Random, prompts: int, version: int = 0, shift: float = 0.0) -> list[Finished]:
    found = []
    for number in range(prompts):
        asked, mean = prompt(chance, number + 10_000 * version)
        tokens = max(1, round(math.exp(chance.gauss(mean + shift, 0.3))))
        found.append(Finished(asked=asked, tokens=tokens, version=version))
    return found


def learned(predictor: LengthPredictor, finished: Sequence[Finished]) -> None:
    predictor.prepare([response.asked for response in finished])
    predictor.learn(finished)


def prepared(predictor: LengthPredictor, new: Sequence[Finished]) -> list[Expectation]:
    asked = [response.asked for response in new]
    predictor.prepare(asked)
    return predictor.expect(asked)


@pytest.mark.parametrize(("predictor", "least"), [(Features(discount=1.0), 0.75), (Lambdarank(), 0.65)])
def test_prompts_that_were_never_seen_are_ordered_by_what_makes_them_long(
    predictor: LengthPredictor, least: float
) -> None:
    chance = random.Random(0)
    learned(predictor, responses(chance, 600))
    new = responses(chance, 300, version=1)
    expected = prepared(predictor, new)
    tokens = [response.tokens for response in new]
    assert spearmanr([each.tokens for each in expected], tokens).statistic > least
    inside = np.mean([each.low <= made <= each.high for each, made in zip(expected, tokens, strict=True)])
    assert inside == pytest.approx(0.8, abs=0.08)


@pytest.mark.parametrize("predictor", [Features(discount=0.5), Lambdarank(most=300)])
def test_it_follows_lengths_that_change_since_old_responses_count_less(predictor: LengthPredictor) -> None:
    chance = random.Random(1)
    for version in range(6):
        learned(predictor, responses(chance, 200, version=version, shift=0.4 * version))
    new = responses(chance, 200, version=6, shift=2.0)
    expected = prepared(predictor, new)
    off = np.mean([math.log(response.tokens / each.tokens) for each, response in zip(expected, new, strict=True)])
    assert abs(off) < 0.5


def test_the_figures_of_a_prompt_are_the_same_in_every_process() -> None:
    asked = Asked(prompt_id="a", prompt_tokens=20, text="Add 12 and 7, and 7.", task="chain_sum")
    figures = TextFigures(8)
    (made,) = figures([asked])
    assert len(made) == figures.size
    tasks, words = (made[table] for table in map(list, figures.tables))
    plain = [1.0, math.log(21), math.log(21), math.log(1), math.log(4), 4 / 20]
    assert made[:6] == pytest.approx(plain)
    assert np.flatnonzero(tasks).tolist() == [5]
    assert tasks.sum() == 1
    assert words.tolist() == pytest.approx([1, 1, 2 + math.sqrt(2), 1, math.sqrt(2), math.sqrt(2), 2, 2])
    assert words.sum() == pytest.approx(9 + 3 * math.sqrt(2)), "and, 7, and the pair of both twice each"
    (without,) = figures([replace(asked, task="")])
    assert not without[figures.tables[0]].any()


@pytest.mark.parametrize("make", [Features, Lambdarank, lambda: HiddenStates(TwoFigures())])
def test_prompts_of_one_task_are_expected_to_be_alike_and_of_an_unknown_one_like_all(
    make: Callable[[], LengthPredictor],
) -> None:
    chance = random.Random(4)
    predictor, lengths = make(), {"proof": 500, "sum": 20}

    def asked(number: int, task: str) -> Asked:
        return Asked(prompt_id=f"{task}/{number}", prompt_tokens=9, text="same words", task=task)

    prompts = [asked(number, task) for number in range(100) for task in lengths]
    learned(
        predictor,
        [
            Finished(asked=one, tokens=round(lengths[one.task] * chance.lognormvariate(0, 0.1)), version=0)
            for one in prompts
        ],
    )
    new = [asked(1000, task) for task in ("proof", "sum", "unknown", "")]
    predictor.prepare(new)
    long, short, unknown, without = (expected.tokens for expected in predictor.expect(new))
    assert long == pytest.approx(500, rel=0.2)
    assert short == pytest.approx(20, rel=0.2)
    assert short * 0.9 < unknown < long * 1.1
    assert unknown == without


def test_nothing_is_expected_of_no_prompt_and_the_same_of_all_before_it_learns() -> None:
    assert Features().expect([]) == []
    one, other = Features().expect([Asked(prompt_id=name, prompt_tokens=9, text=name) for name in ("a", "b")])
    assert one == other


def test_a_prompt_that_was_not_prepared_is_expected_to_be_like_all_others() -> None:
    predictor = Features()
    learned(predictor, responses(random.Random(2), 200))
    late, known = Asked(prompt_id="late", prompt_tokens=500, text="proof " * 100), responses(random.Random(2), 1)
    prepared(predictor, known)
    (expected,) = predictor.expect([late])
    predictor.learn([Finished(asked=late, tokens=10**6, version=0)])
    prepared(predictor, known)
    assert predictor.expect([late]) == [expected], "nor is it learned from"


def test_few_responses_or_one_prompt_tell_no_order() -> None:
    predictor = Lambdarank()
    asked = [Asked(prompt_id=str(number), prompt_tokens=number) for number in range(2)]
    predictor.prepare(asked)
    predictor.learn([Finished(asked=asked[0], tokens=number + 1, version=0) for number in range(100)])
    predictor.prepare(asked)
    one, other = predictor.expect(asked)
    assert one == other
    assert not predictor.knows(asked[0])


class TwoFigures:
    """Reads the number of words, and noise."""

    size = 2
    identity = "two"

    def __call__(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        return np.array([(len(text.split()), len(text) % 7) for text in texts], np.float32).reshape(-1, 2)


def test_hidden_states_tell_lengths_apart() -> None:
    chance = random.Random(3)

    def some(version: int, number: int) -> list[Finished]:
        found = []
        for place in range(number):
            words = chance.randint(1, 40)
            asked = Asked(prompt_id=f"{version}/{place}", prompt_tokens=9, text=" ".join(["word"] * words))
            tokens = round(math.exp(chance.gauss(3 + words / 20, 0.1)))
            found.append(Finished(asked=asked, tokens=tokens, version=version))
        return found

    predictor = HiddenStates(TwoFigures())
    learned(predictor, some(0, 300))
    new = some(1, 100)
    for response, expected in zip(new, prepared(predictor, new), strict=True):
        assert math.log(expected.tokens / response.tokens) == pytest.approx(0, abs=0.5)
