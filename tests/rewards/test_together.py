"""Asynchronous graders: one process does many gradings at a time, and each ends separately."""

import asyncio

import pytest

from tailrace.config.rewards import ExactReward, FunctionReward, GradingConfig, RewardsConfig
from tailrace.errors import TailraceWarning
from tailrace.rewards.base import Grade
from tailrace.rewards.pool import GraderPool, capacity_of
from tests.rewards.requests import make_request


def pool(*, concurrency: int = 4, timeout_s: float = 60.0) -> GraderPool:
    grader = FunctionReward(path="tests.rewards.async_graders.score", concurrency=concurrency)
    return GraderPool(GradingConfig(grader=grader, workers=1, timeout_s=timeout_s))


async def ask(graders: GraderPool, *responses: str) -> list[Grade]:
    return await asyncio.gather(*(graders.grade(make_request(response)) for response in responses))


async def test_as_many_gradings_run_at_a_time_as_the_recipe_says_and_each_gets_its_own_reply() -> None:
    async with pool(concurrency=4) as graders:
        assert graders.capacity == 4
        grades = await ask(graders, *("meet" for _ in range(8)), *map(str, range(20)))
    assert [grade.reward for grade in grades] == [4.0] * 8 + [float(number) for number in range(20)]


@pytest.mark.parametrize(
    ("grader", "capacity"),
    [
        (FunctionReward(path="tests.rewards.async_graders.score", concurrency=4), 2 * 4),
        (FunctionReward(path="tests.rewards.graders_for_tests.act", concurrency=4), 2),
        (ExactReward(), 2),
    ],
)
async def test_the_capacity_of_a_pool_is_known_before_it_starts(
    grader: FunctionReward | ExactReward, capacity: int
) -> None:
    config = RewardsConfig(grader=grader, workers=2)
    assert await capacity_of(config) == capacity
    async with GraderPool(config.each[""]) as graders:
        assert graders.capacity == capacity


async def test_a_function_that_cannot_be_called_here_counts_as_a_plain_one() -> None:
    config = RewardsConfig(grader=FunctionReward(path="no_such_package.score"), workers=2)
    with pytest.warns(TailraceWarning, match=r"no module 'no_such_package'.*; so it counts .*: 2 gradings at a time"):
        assert await capacity_of(config) == 2


async def test_a_grading_that_takes_too_long_is_cancelled_and_the_others_go_on() -> None:
    async with pool(timeout_s=0.5) as graders:
        late, *others = await ask(graders, "wait", "1", "2", "divide", "exit", "interrupt", "part")
        assert late.error == "timeout: grading took longer than 0.5 s"
        assert [grade.reward for grade in others] == [1.0, 2.0, None, None, None, 0.5]
        assert [(grade.error or "").partition(" ")[0] for grade in others[2:5]] == [
            "ZeroDivisionError:",
            "SystemExit:",
            "KeyboardInterrupt",
        ]
        assert others[5].parts == {"correct": 1.0}
        (own,) = await ask(graders, "too late of its own")
        assert (own.error or "").startswith("TimeoutError: the service (")


async def test_a_grading_that_gives_no_way_is_ended_with_its_process() -> None:
    async with pool(timeout_s=0.2) as graders:
        first, second = await ask(graders, "block", "wait")
        assert first.error == "timeout: grading took longer than 0.2 s"
        assert second.reward is None
        assert [grade.reward for grade in await ask(graders, "1", "2")] == [1.0, 2.0]


async def test_the_death_of_a_process_is_told_to_each_of_its_gradings() -> None:
    async with pool() as graders:
        grades = await ask(graders, "wait", "wait", "die")
        assert [grade.error for grade in grades] == ["died: exit code 7"] * 3
        assert [grade.reward for grade in await ask(graders, "5")] == [5.0]
