"""Functions that see a whole group: what they get, what they return, and how they fail."""

import asyncio
from typing import Any

import pytest

from tailrace.config.rewards import FunctionReward, GradingConfig, GroupFunctionReward, NamedRewardConfig, RewardsConfig
from tailrace.errors import UserError
from tailrace.rewards.base import Grade
from tailrace.rewards.graders import Graders, Group
from tailrace.rewards.pool import GraderPool
from tests.rewards.requests import make_request

HERE = "tests.rewards.group_graders"


def grading(function: str, **fields: Any) -> GradingConfig:
    return GradingConfig(grader=GroupFunctionReward(path=f"{HERE}.{function}"), **{"workers": 1, **fields})


async def grades(function: str, *responses: str, **fields: Any) -> list[Grade]:
    requests = [make_request(text, answer="a", metadata={"k": [1]}) for text in responses]
    async with GraderPool(grading(function, **fields)) as pool:
        return await pool.grade_all(requests)


async def test_a_function_gets_all_responses_and_returns_a_result_for_each() -> None:
    found = await grades("rank", "three", "x", "four")
    assert [grade.reward for grade in found] == [2.0, 0.0, 1.0]


async def test_an_asynchronous_function_grades_several_groups_at_a_time() -> None:
    async with GraderPool(grading("rank_later")) as pool:
        assert pool.capacity == 16
        groups = [[make_request("x" * (k % size)) for k in range(2 * size)] for size in range(1, 20)]
        found = await asyncio.gather(*map(pool.grade_all, groups))
    assert [[grade.reward for grade in group] for group in found] == [[2.0] * 2 * size for size in range(1, 20)]


async def test_a_function_gets_tokens_and_ends_of_each_and_gives_parts() -> None:
    requests = [
        make_request("", tokens=[1, 2, 3], finish_reason="length"),
        make_request("", tokens=[1], finish_reason="stop"),
    ]
    async with GraderPool(grading("shares")) as pool:
        first, second = await pool.grade_all(requests)
        alone = await pool.grade(requests[1])
    assert (first.reward, first.correct, second.reward, second.correct) == (0.75, False, 0.25, True)
    assert alone.reward == 1.0, "a response by itself is a group of one"


async def test_a_result_that_is_no_reward_fails_alone() -> None:
    none, nan, listed, fine = await grades("act", *"abcd")
    assert [(grade.error or "").partition(",")[0] for grade in (none, nan, listed, fine)] == [
        "TypeError: the grader must return a number or a mapping",
        "ValueError: the grader returned nan; a reward must be a number from -1e+09 to 1e+09",
        "TypeError: the grader must return a number or a mapping",
        "",
    ]
    assert fine.reward == 0.5


@pytest.mark.parametrize(
    ("what", "error"),
    [
        ("too few", "TypeError: the grader returned 1 results for 4 responses; return one for each"),
        ("none", "TypeError: the grader must return a list, a result for each response, not NoneType"),
        ("a number", "TypeError: the grader must return a list, a result for each response, not float"),
        ("text", "TypeError: the grader must return a list, a result for each response, not str"),
        ("a mapping", "TypeError: the grader must return a list, a result for each response, not dict"),
        ("divide", "ZeroDivisionError: division by zero ("),
        ("loop", "timeout: grading took longer than 0.5 s"),
        ("die", "died: exit code 3"),
    ],
)
async def test_a_failure_of_the_whole_is_that_of_each_response(what: str, error: str) -> None:
    found = await grades("act", what, "b", "c", "d", timeout_s=0.5 if what == "loop" else 60.0)
    assert len(found) == 4
    assert all((grade.error or "").startswith(error) for grade in found), found[0].error


async def test_an_array_of_numbers_is_a_list_of_rewards() -> None:
    assert [grade.reward for grade in await grades("act", "an array", "", "", "")] == [0.0, 1.0, 2.0, 3.0]


async def test_a_function_of_one_response_is_told_what_a_function_of_a_group_gets() -> None:
    with pytest.raises(
        UserError,
        match=r"is called by name with prompt, question, answer, metadata, responses, tokens, finish_reasons and .*"
        r"; it cannot be: missing a required argument: 'response'; did you mean 'responses'\?",
    ):
        await grades("wants_one", "x")


async def test_answers_of_an_evaluation_wait_for_the_others_of_their_group() -> None:
    one = NamedRewardConfig(grader=FunctionReward(path="tests.helpers.graders.digit_fraction"), workers=1)
    all_ = NamedRewardConfig(grader=GroupFunctionReward(path=f"{HERE}.digits_above_mean"), workers=1, weight=2.0)
    async with Graders(RewardsConfig(graders={"one": one, "all": all_})) as graders:
        group = Group(3)
        request = {"metadata": {}, "prompt": "p", "answer": "a"}
        asked = [
            asyncio.create_task(graders.grade(make_request(text, **request), group, place))
            for place, text in ((2, "77"), (0, "a"))
        ]
        done, _ = await asyncio.wait(asked, timeout=0.2)
        assert not done
        last = await graders.grade(make_request("1", **request), group, 1)
        third, first = [await task for task in asked]
    assert [grade.parts["all"] for grade in (first, last, third)] == [-1.0, 0.0, 1.0]
    assert [grade.reward for grade in (first, last, third)] == [-2.0, 1.0, 3.0]
    assert last.parts["all.size"] == 3
