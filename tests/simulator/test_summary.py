"""Claims on the figures of a simulated run."""

from dataclasses import replace

import pytest

from tailrace.simulator.run import SimulatedRun
from tailrace.simulator.scenario import Scenario, TrainerKind
from tailrace.simulator.summary import Summary, Summing, binding
from tailrace.workloads.replay import Replay
from tests.simulator.test_run import SMALL, Paced, lengths


def summed(scenario: Scenario, replay: Replay, warm_up: int = 0) -> Summary:
    summing = Summing(warm_up)
    SimulatedRun(scenario, replay, sinks=(summing,)).run()
    return summing.summary(preemptions=0, graders=scenario.graders)


def test_shares_are_of_the_time_that_counts() -> None:
    found = summed(SMALL, lengths([3], [5], [2], [2]))
    generated, second = 1.02 + 2 * 1.2 + 2 * 1.1, 1.02 + 1.2
    assert found.generating * found.step_s * 2 == pytest.approx(generated + second)
    assert found.training * found.step_s * 2 == pytest.approx(0.28 + 0.24 + 2 * 2.0)
    assert found.weights * found.step_s * 2 == pytest.approx(2 * 1.5)
    assert found.samples_per_s == pytest.approx(4 / (2 * found.step_s))
    assert found.tokens_per_s == pytest.approx(12 / (2 * found.step_s))


def test_a_step_ends_when_the_critic_has_been_trained_too() -> None:
    slow = replace(SMALL, critic=TrainerKind(times=Paced(5.0)))
    found = summed(slow, lengths([3], [5], [2], [2]))
    generated, trained = 1.02 + 2 * 1.2 + 2 * 1.1 + 1.02 + 1.2, (28 + 24) / 5 + 2 * 2.0
    values = (15 + 24) / 20  # of the second group, and of both
    assert 2 * found.step_s == pytest.approx(generated + values + trained)
    assert found.critic == pytest.approx((trained + (28 + 24) / 20) / (2 * found.step_s))
    assert binding(found) == "the critic"


def test_steps_of_the_warm_up_do_not_count() -> None:
    found = summed(SMALL, lengths([300], [5], [2], [2]), warm_up=1)
    assert found.steps == 1
    assert found.longest_s == pytest.approx(2.22)


@pytest.mark.parametrize(
    ("changes", "binds"),
    [
        ({}, "training"),
        ({"grade_s": 100.0}, "grading"),
        ({"trainer": replace(SMALL.trainer, times=Paced(1e9), publish_s=100.0)}, "the way of weights"),
    ],
)
def test_what_binds_is_the_stage_that_is_busy(changes: dict[str, object], binds: str) -> None:
    slow = replace(SMALL, **{"trainer": replace(SMALL.trainer, times=Paced(0.5)), **changes})  # type: ignore[arg-type]
    assert binding(summed(slow, lengths([3], [5], [2], [2]))) == binds
