"""The weighted sum of several rewards: its number, its parts, its verdict and its errors."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.config.load import load_config
from tailrace.config.rewards import FunctionReward, NamedRewardConfig, RewardsConfig
from tailrace.errors import ConfigError, UserError
from tailrace.rewards.base import Grade
from tailrace.rewards.graders import Graders, added_up
from tests.rewards.requests import make_request

GRADERS = "tests.rewards.graders_for_tests"
BASE = {"output_dir": "o", "prompts": {"source": {"type": "jsonl", "path": "p.jsonl"}}}


def rewards(correct_at: float | None = None, **weights: float) -> RewardsConfig:
    """A reward for each of `weights`, by the function `act`."""
    return RewardsConfig(
        graders={name: named(weight=weight) for name, weight in weights.items()}, correct_at=correct_at
    )


def named(function: str = "act", **fields: Any) -> NamedRewardConfig:
    return NamedRewardConfig(grader=FunctionReward(path=f"{GRADERS}.{function}"), **{"workers": 1, **fields})


@given(
    st.dictionaries(
        st.sampled_from(["a", "b", "c", "d"]),
        st.tuples(st.floats(-1e6, 1e6), st.one_of(st.none(), st.floats(-1e9, 1e9)), st.sampled_from([None, 0.0, 1.0])),
        min_size=1,
    )
)
def test_the_sum_is_weighted_and_missing_where_a_reward_is(given: dict[str, Any]) -> None:
    config = rewards(**{name: weight for name, (weight, _, _) in given.items()})
    grades = {
        name: Grade(
            reward=reward,
            parts={} if verdict is None or reward is None else {"correct": verdict},
            error=None if reward is not None else f"{name}.timeout: late",
        )
        for name, (_, reward, verdict) in given.items()
    }
    total = added_up(grades, config)
    verdicts = [grade.correct for grade in grades.values() if grade.correct is not None]
    if any(grade.reward is None for grade in grades.values()):
        assert (total.reward, total.correct) == (None, None)
        assert (total.error or "").splitlines() == [grade.error for grade in grades.values() if grade.error]
    else:
        assert total.reward == sum(weight * reward for weight, reward, _ in given.values())
        assert total.error is None
        assert total.correct == (all(verdicts) if verdicts else None)
    known = {name: grade.reward for name, grade in grades.items() if grade.reward is not None}
    assert {name: value for name, value in total.parts.items() if "." not in name and name != "correct"} == known


def test_parts_stand_behind_the_name_of_their_reward() -> None:
    grades = {"a": Grade(reward=0.5, parts={"length": 3.0, "correct": 1.0}), "b": Grade(reward=2.0)}
    total = added_up(grades, rewards(a=2.0, b=-0.25))
    assert total == Grade(reward=0.5, parts={"a": 0.5, "a.length": 3.0, "a.correct": 1.0, "b": 2.0, "correct": 1.0})


def test_a_threshold_of_the_sum_takes_the_place_of_verdicts() -> None:
    grades = {"a": Grade(reward=1.0, parts={"correct": 0.0}), "b": Grade(reward=1.0)}
    assert added_up(grades, rewards(1.5, a=1.0, b=1.0)).correct is True
    assert added_up(grades, rewards(2.5, a=1.0, b=1.0)).correct is False


def test_a_stated_reward_of_a_failure_counts_and_gives_no_verdict() -> None:
    grades = {"a": Grade(reward=-1.0, error="a.died: exit code 3"), "b": Grade(reward=1.0, parts={"correct": 1.0})}
    total = added_up(grades, rewards(a=1.0, b=2.0))
    assert (total.reward, total.correct, total.error) == (1.0, None, "a.died: exit code 3")


async def test_each_reward_has_processes_of_its_own_and_a_failure_of_one_has_its_name() -> None:
    config = RewardsConfig(graders={"half": named(), "number": named("number", weight=10.0, timeout_s=60.0)})
    async with Graders(config) as graders:
        fine = await graders.grade(make_request("2"))
        bad = await graders.grade(make_request("exit"))
    assert (fine.reward, fine.parts) == (20.5, {"half": 0.5, "number": 2.0})
    assert bad.reward is None
    first, second = (bad.error or "").splitlines()
    assert first == "half.died: exit code 3"
    assert second.startswith("number.ValueError: could not convert string to float: 'exit' (")
    assert "could not convert" in (bad.traceback or "")


async def test_a_grader_that_cannot_be_made_closes_the_others() -> None:
    config = RewardsConfig(graders={"fine": named(), "gone": named("gone")})
    graders = Graders(config)
    with pytest.raises(UserError, match=r"rewards\.graders\.gone\.grader\.path .* has no 'gone'"):
        await graders.__aenter__()
    assert all(slot.worker is None or not slot.worker.alive for slot in graders.pools["fine"]._slots)


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ("{}", "rewards has no grader; give grader, or several rewards in graders"),
        ("{graders: {}}", "rewards has no grader"),
        ("{grader: {type: math}, graders: {a: {grader: {type: math}}}}", "rewards has both grader and graders"),
        (
            "{retries: 2, graders: {a: {grader: {type: math}}}}",
            "has retries 2 beside graders.*; give graders.a.retries",
        ),
        ("{graders: {a: {weight: .nan, grader: {type: math}}}}", "rewards.graders.a.weight is .nan: .* finite"),
        ("{graders: {a: {weight: -.inf, grader: {type: math}}}}", "rewards.graders.a.weight is -.inf: .* finite"),
        ("{graders: {a: {weight: 1e9, grader: {type: math}}}}", "rewards.graders.a.weight is 1000000000.0"),
        ("{graders: {a: {grader: {type: math}}, a: {grader: {type: math}}}}", "the key 'a' is there twice"),
        ("{graders: {correct: {grader: {type: math}}}}", "has a reward named 'correct'.*; rename it"),
        ("{graders: {A b: {grader: {type: math}}}}", "rewards.graders.A b is 'A b': string should match pattern"),
        ("{graders: {a: {weight: 2}}}", "rewards.graders.a.grader is required and missing"),
        ("{graders: {a: {grader: {type: math}, wieght: 2}}}", "did you mean rewards.graders.a.weight?"),
        (f"{{graders: {{{', '.join(f'r{k}: {{grader: {{type: math}}}}' for k in range(17))}}}}}", "at most 16"),
    ],
)
def test_rewards_that_cannot_be_added_up_are_refused_in_one_line(section: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        load_config(BASE, [f"rewards={section}"])
    assert "\n" not in str(caught.value)


async def test_a_failed_grading_has_the_reward_of_the_recipe_in_the_sum_as_well() -> None:
    config = RewardsConfig(graders={"a": named(weight=2.0), "b": named(failure_reward=-1.0)})
    async with Graders(config) as graders:
        failed = await graders.grade(make_request("divide"))
        assert (failed.parts["b"], "a" in failed.parts) == (-1.0, False)
        assert failed.reward is None, "nothing says what a's failure counts for"
    alone = RewardsConfig(grader=FunctionReward(path=f"{GRADERS}.act"), workers=1, failure_reward=-1.0)
    async with Graders(alone) as graders:
        grade = await graders.grade(make_request("divide"))
        assert grade.reward == -1.0
        assert grade.error is not None
