"""The costs of an engine's steps, as fitted to the steps that it has made."""

import random

import pytest

from tailrace.planning.dispatch.costs import ObservedSteps, StepCosts

TRUE = StepCosts(base=5e-3, each=4e-4, context=2e-7, prefill=1e-4)


def drained(costs: StepCosts, *, seed: int = 0, noise: float = 0.0, begun: int = 64) -> ObservedSteps:
    """The steps of a batch whose responses end one after the other."""
    chance = random.Random(seed)
    steps = ObservedSteps()
    lengths = sorted(chance.randint(20, 400) for _ in range(begun))
    for now in range(lengths[-1]):
        size = sum(length > now for length in lengths)
        context = size * (100 + now)
        steps.decoded(size, context, costs.step_s(1, size, context, 1) * chance.uniform(1 - noise, 1 + noise))
    return steps


def test_without_noise_the_fit_is_exact() -> None:
    steps = drained(TRUE)
    steps.prefilled(100, 0, 0, 100 * TRUE.prefill)
    costs = steps.costs
    assert costs is not None
    for name in ("base", "each", "context", "prefill"):
        assert getattr(costs, name) == pytest.approx(getattr(TRUE, name), rel=1e-4)


def test_the_cost_of_prompts_is_without_that_of_sequences_beside_them() -> None:
    decoded_s = TRUE.step_s(1, 64, 9000, 1)
    early = ObservedSteps()
    early.prefilled(30, 64, 9000, 30 * TRUE.prefill + decoded_s)
    assert early.costs is None
    for steps in (drained(TRUE), early):
        for size in range(1, 20):
            context = 90 * size + size * size
            steps.decoded(size, context, TRUE.step_s(1, size, context, 1))
        steps.prefilled(30, 64, 9000, 30 * TRUE.prefill + decoded_s)
        costs = steps.costs
        assert costs is not None
        assert costs.prefill == pytest.approx(TRUE.prefill, rel=1e-3)


def test_with_noise_the_steps_are_predicted_within_a_few_percent() -> None:
    costs = drained(TRUE, noise=0.2).costs
    assert costs is not None
    for size, context in ((1, 300), (8, 2000), (64, 9000)):
        assert costs.step_s(1, size, context, 1) == pytest.approx(TRUE.step_s(1, size, context, 1), rel=0.1)


def test_no_cost_is_negative_where_all_steps_are_alike() -> None:
    steps = ObservedSteps()
    for now in range(50):
        steps.decoded(4, 400, 0.01 + 1e-5 * (-1) ** now)
    costs = steps.costs
    assert costs is not None
    assert min(costs.base, costs.each, costs.context) >= 0
    assert costs.step_s(1, 4, 400, 1) == pytest.approx(0.01, rel=1e-2)


def test_a_few_steps_say_nothing() -> None:
    steps = ObservedSteps()
    for _ in range(15):
        steps.decoded(4, 400, 0.01)
    assert steps.costs is None


def test_large_batches_are_remembered_while_small_ones_are_decoded_for_long() -> None:
    steps = drained(TRUE)
    for now in range(5000):
        steps.decoded(1, 500 + now, TRUE.step_s(1, 1, 500 + now, 1))
    costs = steps.costs
    assert costs is not None
    assert costs.step_s(1, 64, 9000, 1) == pytest.approx(TRUE.step_s(1, 64, 9000, 1), rel=1e-3)


def test_a_machine_that_slows_down_is_followed() -> None:
    steps = drained(TRUE, begun=63)
    slow = StepCosts(base=2 * TRUE.base, each=2 * TRUE.each, context=2 * TRUE.context, prefill=0.0)
    for now in range(600):
        size = 1 + now % 63
        steps.decoded(size, 200 * size, slow.step_s(1, size, 200 * size, 1))
    for now in range(600):
        size = 1 + now % 63
        steps.decoded(size, 300 * size, slow.step_s(1, size, 300 * size, 1))
    costs = steps.costs
    assert costs is not None
    assert costs.step_s(1, 32, 8000, 1) == pytest.approx(slow.step_s(1, 32, 8000, 1), rel=0.05)
