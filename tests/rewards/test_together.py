"""Asynchronous graders: one process does many gradings at a time, and each ends separately."""

import asyncio

from tailrace.config.rewards import FunctionReward, RewardsConfig
from tailrace.rewards.base import Grade
from tailrace.rewards.pool import GraderPool
from tests.rewards.requests import make_request


def pool(*, concurrency: int = 4, timeout_s: float = 60.0) -> GraderPool:
    grader = FunctionReward(path="tests.rewards.async_graders.score", concurrency=concurrency)
    return GraderPool(RewardsConfig(grader=grader, workers=1, timeout_s=timeout_s))


async def ask(graders: GraderPool, *responses: str) -> list[Grade]:
    return await asyncio.gather(*(graders.grade(make_request(response)) for response in responses))


async def test_as_many_gradings_run_at_a_time_as_the_recipe_says_and_each_gets_its_own_reply() -> None:
    async with pool(concurrency=4) as graders:
        assert graders.capacity == 4
        grades = await ask(graders, *("meet" for _ in range(8)), *map(str, range(20)))
    assert [grade.reward for grade in grades] == [4.0] * 8 + [float(number) for number in range(20)]


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
