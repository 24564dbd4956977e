"""Claims on what is expected of simulated responses."""

import math
from dataclasses import replace
from statistics import pstdev

import pytest

from tailrace.simulator.lengths import SimulatedLengths
from tailrace.workloads.replay import Script, Turn
from tests.simulator.test_run import SMALL


def expected(error: float, *tokens: int) -> list[tuple[float, float]]:
    """Of each response, the logarithm of what is expected over what comes, and how far off that is said to be."""
    scenario = replace(SMALL, knows_lengths="lengths", expectation_error=error)
    scripts = [Script(prompt_tokens=5, turns=(Turn(generated_tokens=each),)) for each in tokens]
    found = SimulatedLengths(scenario, max(tokens)).of(0, scripts)
    return [(math.log(one.tokens / script.tokens), one.deviation) for one, script in zip(found, scripts, strict=True)]


def test_expectations_say_how_far_they_are_off() -> None:
    errors, said = zip(*expected(0.5, *[100] * 400), strict=True)
    assert pstdev(errors) == pytest.approx(0.5, rel=0.1)
    assert list(said) == pytest.approx([0.5] * 400)


def test_lengths_that_are_known_are_exact() -> None:
    assert expected(0.0, 7, 9) == [(0.0, 0.0), (0.0, 0.0)]
