"""Regression on figures of the prompt finds what lengths depend on."""

import math
import random

import numpy as np
import pytest
from scipy.stats import spearmanr

from tailrace.planning.lengths.base import Asked, Finished
from tailrace.planning.lengths.features import Features

HARD = ("integral", "proof", "graph")
EASY = ("sum", "word", "colour")


def prompt(chance: random.Random, number: int) -> tuple[Asked, float]:
    """A prompt, and the logarithm of its typical length: hard words and many tokens make it long."""
    words = [chance.choice(HARD + EASY) for _ in range(chance.randint(3, 30))]
    asked = Asked(
        prompt_id=str(number), prompt_tokens=2 * len(words), task=chance.choice(["one", "two"]), text=" ".join(words)
    )
    hard = sum(word in HARD for word in words) / len(words)
    return asked, 4 + 2 * hard + 0.3 * math.log(len(words)) + (0.5 if asked.task == "two" else 0.0)


def responses(chance: random.Random, prompts: int, version: int = 0, shift: float = 0.0) -> list[Finished]:
    found = []
    for number in range(prompts):
        asked, mean = prompt(chance, number + 10_000 * version)
        tokens = max(1, round(math.exp(chance.gauss(mean + shift, 0.3))))
        found.append(Finished(asked=asked, tokens=tokens, version=version))
    return found


def test_prompts_that_were_never_seen_are_ordered_by_what_makes_them_long() -> None:
    chance = random.Random(0)
    predictor = Features(discount=1.0)
    assert not predictor.ready
    predictor.learn(responses(chance, 600))
    assert predictor.ready
    new = responses(chance, 300, version=1)
    expected = predictor.expect([response.asked for response in new])
    tokens = [response.tokens for response in new]
    ranks = spearmanr([each.tokens for each in expected], tokens).statistic
    assert ranks > 0.75
    inside = np.mean([each.low <= made <= each.high for each, made in zip(expected, tokens, strict=True)])
    assert inside == pytest.approx(0.8, abs=0.08)


def test_it_follows_lengths_that_change() -> None:
    chance = random.Random(1)
    predictor = Features(discount=0.5)
    for version in range(6):
        predictor.learn(responses(chance, 200, version=version, shift=0.4 * version))
    new = responses(chance, 200, version=6, shift=2.0)
    expected = predictor.expect([response.asked for response in new])
    off = np.mean([math.log(response.tokens / each.tokens) for each, response in zip(expected, new, strict=True)])
    assert abs(off) < 0.5


def test_the_figures_of_a_prompt_are_the_same_in_every_process() -> None:
    made = Features(words=8)._made(Asked(prompt_id="a", prompt_tokens=20, task="t", text="Add 12 and 7, and 7."))
    plain = [1.0, math.log(21), math.log(21), 4 / 20]
    assert made[:4] == pytest.approx(plain)
    assert np.flatnonzero(made[4:]).tolist() == [0, 2, 5, 6, 7]
    assert made[4:].sum() == pytest.approx(5 * math.log(2) + 2 * math.log(3)), "and, 7 twice each"


def test_nothing_is_expected_of_no_prompt_and_the_same_of_all_before_it_learns() -> None:
    assert Features().expect([]) == []
    one, other = Features().expect([Asked(prompt_id=name, prompt_tokens=9, text=name) for name in ("a", "b")])
    assert one == other
