"""Evaluations ask the workers of a reward model, whichever of them may die."""

import asyncio
from typing import Any, cast

import pytest

from tailrace.cluster.pool import Pool
from tailrace.errors import ClusterError, WorkerDied
from tailrace.rewards.base import Grade
from tailrace.run.worker_graders import WorkerGraders
from tests.rewards.requests import make_request


class Workers:
    """A pool of two workers, of which one has died and the other may."""

    names = ("reward.rm-0", "reward.rm-1")

    def __init__(self, *ends: Exception | None) -> None:
        """`ends`: the end of each call in turn; None: it returns a grade."""
        self.ends = list(ends)
        self.asked: list[int] = []

    async def call(self, index: int, method: str, *args: Any) -> Grade:
        await asyncio.sleep(0)
        self.asked.append(index)
        assert method == "grade"
        if (end := self.ends.pop(0)) is not None:
            raise end
        reward, request = args
        return Grade(reward=float(request.response), parts={reward: 1.0})


def graders(workers: Workers) -> WorkerGraders:
    return WorkerGraders(cast(Pool, workers), "rm")


async def test_workers_are_asked_by_turns_and_one_that_died_again() -> None:
    workers = Workers(
        None, WorkerDied.of("reward.rm-1", 7, "SIGKILL"), WorkerDied.of("reward.rm-1", 8, "SIGKILL"), None, None
    )
    asked = graders(workers)
    grades = [await asked.grade(make_request(text)) for text in "123"]
    assert [(grade.reward, grade.parts) for grade in grades] == [
        (1.0, {"rm": 1.0}),
        (2.0, {"rm": 1.0}),
        (3.0, {"rm": 1.0}),
    ]
    assert workers.asked == [0, 1, 1, 1, 0]


async def test_too_many_deaths_reach_the_evaluation() -> None:
    with pytest.raises(ClusterError, match="11 workers died"):
        await graders(Workers(ClusterError("11 workers died within 10 minutes"))).grade(make_request("1"))


async def test_a_worker_is_asked_for_a_bounded_number_of_grades_at_a_time() -> None:
    class Slow(Workers):
        under_way = most = 0

        async def call(self, index: int, method: str, *args: Any) -> Grade:
            self.under_way += 1
            self.most = max(self.most, self.under_way)
            await asyncio.sleep(0)
            self.under_way -= 1
            return Grade(reward=1.0)

    workers = Slow()
    asked = graders(workers)
    grades = await asyncio.gather(*(asked.grade(make_request("1")) for _ in range(500)))
    assert len(grades) == 500
    assert workers.most == 2 * 64
