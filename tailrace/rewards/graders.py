"""All grading processes of a recipe, and the sum of several rewards.

    grade(request) ──▶ a pool for each of `rewards.graders` ──Grade by name──▶ added_up ──▶ Grade

A run's tasks use the pools one by one (algorithms/rewards.py); an evaluation uses the sum.
"""

import asyncio
from collections.abc import Mapping
from types import TracebackType
from typing import Protocol, Self

import msgspec

from tailrace.config.rewards import RewardsConfig
from tailrace.errors import first_error
from tailrace.rewards.base import CORRECT, Grade, GradingRequest
from tailrace.rewards.pool import GraderPool


class GraderElsewhere(Protocol):
    """A grader that is not in processes of this one."""

    async def grade(self, request: GradingRequest) -> Grade:
        """The grade of `request`."""


class Graders:
    """The pools of a recipe: `async with Graders(config) as graders: grade = await graders.grade(request)`."""

    def __init__(self, config: RewardsConfig, elsewhere: Mapping[str, GraderElsewhere] | None = None) -> None:
        """`elsewhere`: the graders of rewards that need no pool here, by the name of the reward."""
        self._config = config
        self._elsewhere = elsewhere or {}
        self.pools: Mapping[str, GraderPool] = {
            name: GraderPool(grading, name) for name, grading in config.each.items() if name not in self._elsewhere
        }
        """By the name of the reward; that of a single grader is empty."""

    async def __aenter__(self) -> Self:
        """Start all workers.

        Raises:
            UserError: a grader cannot be made; see `GraderPool`.
        """
        try:
            async with asyncio.TaskGroup() as starting:
                for pool in self.pools.values():
                    starting.create_task(pool.__aenter__())
        except BaseException as error:
            await self.close()
            raise first_error(error) if isinstance(error, BaseExceptionGroup) else error from None
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all pools. Closing twice is harmless."""
        await asyncio.gather(*(pool.close() for pool in self.pools.values()))

    async def grade(self, request: GradingRequest, group: "Group | None" = None, place: int = 0) -> Grade:
        """The grade of `request`: that of the one grader, or the sum of the rewards by name.

        `group`: the responses that it is one of, by default alone. `place`: its number among them. A grader that sees
        groups waits for all of them.

        Raises:
            RewardError: the pools are closed.
        """
        group = group or Group(1)
        names = list(self._config.each)
        grades = await asyncio.gather(*(self._graded(name, request, group, place) for name in names))
        return added_up(dict(zip(names, grades, strict=True)), self._config) if self._config.graders else grades[0]

    async def _graded(self, name: str, request: GradingRequest, group: "Group", place: int) -> Grade:
        """By one grader. A failed grading has the reward that the recipe gives it, as in training."""
        grade = await self._asked(name, request, group, place)
        if grade.reward is None:
            grade = msgspec.structs.replace(grade, reward=self._config.each[name].failure_reward)
        return grade

    async def _asked(self, name: str, request: GradingRequest, group: "Group", place: int) -> Grade:
        if name in self._elsewhere:
            return await self._elsewhere[name].grade(request)
        if not self._config.each[name].sees_groups:
            return await self.pools[name].grade(request)
        return (await group.graded(name, self.pools[name], request, place))[place]


class Group:
    """The responses to one prompt, which come one by one, and their grades by graders that see all of them."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._requests: dict[int, GradingRequest] = {}
        self._whole = asyncio.Event()
        self._grades: dict[str, asyncio.Task[list[Grade]]] = {}

    async def graded(self, name: str, pool: GraderPool, request: GradingRequest, place: int) -> list[Grade]:
        """Add a response, wait for the others, and return the grades of all. `name`: of the reward."""
        self._requests[place] = request
        if len(self._requests) == self._size:
            self._whole.set()
        await self._whole.wait()
        if name not in self._grades:
            requests = [self._requests[number] for number in range(self._size)]
            self._grades[name] = asyncio.create_task(pool.grade_all(requests))
        return await self._grades[name]


def added_up(grades: Mapping[str, Grade], config: RewardsConfig) -> Grade:
    """The weighted sum of the rewards by name; there is none where one of them is missing.

    Its parts are the rewards by their names, and their parts as `<name>.<part>`. Its error has a line for each failed
    grading. Where none failed, a response is right if a grader says so and none says otherwise, or by `correct_at` of
    the sum. Its final answer is that of the first grader that says one.
    """
    parts: dict[str, float] = {}
    spent = {what: amount for grade in grades.values() for what, amount in grade.spent.items()}
    for name, grade in grades.items():
        if grade.reward is not None:
            parts[name] = grade.reward
        parts |= {f"{name}.{part}": value for part, value in grade.parts.items()}
    error = "\n".join(grade.error for grade in grades.values() if grade.error) or None
    traceback = next((grade.traceback for grade in grades.values() if grade.traceback), None)
    rewards = {name: grade.reward for name, grade in grades.items() if grade.reward is not None}
    if len(rewards) < len(grades):
        return Grade(reward=None, parts=parts, error=error, spent=spent, traceback=traceback)
    total = sum(config.graders[name].weight * reward for name, reward in rewards.items())
    verdicts = [grade.correct for grade in grades.values() if grade.correct is not None]
    if config.correct_at is not None:
        verdicts = [total >= config.correct_at]
    if verdicts and error is None:
        parts[CORRECT] = float(all(verdicts))
    finals = (grade.final_answer for grade in grades.values() if grade.final_answer is not None)
    final = next(finals, None)
    return Grade(reward=total, parts=parts, final_answer=final, error=error, spent=spent, traceback=traceback)
