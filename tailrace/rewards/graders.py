"""All grading processes of a recipe, and the sum of several rewards.

    grade(request) ──▶ a pool for each of `rewards.graders` ──Grade by name──▶ added_up ──▶ Grade

A run's tasks use the pools one by one (algorithms/named_rewards.py); an evaluation uses the sum.
"""

import asyncio
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from tailrace.config.rewards import RewardsConfig
from tailrace.errors import first_error
from tailrace.rewards.base import CORRECT, Grade, GradingRequest
from tailrace.rewards.pool import GraderPool


class Graders:
    """The pools of a recipe: `async with Graders(config) as graders: grade = await graders.grade(request)`."""

    def __init__(self, config: RewardsConfig) -> None:
        self._config = config
        self.pools: Mapping[str, GraderPool] = {
            name: GraderPool(grading, name) for name, grading in config.each.items()
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

    async def grade(self, request: GradingRequest) -> Grade:
        """The grade of `request`: that of the one grader, or the sum of the rewards by name.

        Raises:
            RewardError: the pools are closed.
        """
        grades = await asyncio.gather(*(pool.grade(request) for pool in self.pools.values()))
        return added_up(dict(zip(self.pools, grades, strict=True)), self._config) if self._config.graders else grades[0]


def added_up(grades: Mapping[str, Grade], config: RewardsConfig) -> Grade:
    """The weighted sum of the rewards by name; there is none where one of them is missing.

    Its parts are the rewards by their names, and their parts as `<name>.<part>`. Its error has a line for each failed
    grading. Where none failed, a response is right if a grader says so and none says otherwise, or by `correct_at` of
    the sum.
    """
    parts: dict[str, float] = {}
    for name, grade in grades.items():
        if grade.reward is not None:
            parts[name] = grade.reward
        parts |= {f"{name}.{part}": value for part, value in grade.parts.items()}
    error = "\n".join(grade.error for grade in grades.values() if grade.error) or None
    traceback = next((grade.traceback for grade in grades.values() if grade.traceback), None)
    rewards = {name: grade.reward for name, grade in grades.items() if grade.reward is not None}
    if len(rewards) < len(grades):
        return Grade(reward=None, parts=parts, error=error, traceback=traceback)
    total = sum(config.graders[name].weight * reward for name, reward in rewards.items())
    verdicts = [grade.correct for grade in grades.values() if grade.correct is not None]
    if config.correct_at is not None:
        verdicts = [total >= config.correct_at]
    if verdicts and error is None:
        parts[CORRECT] = float(all(verdicts))
    return Grade(reward=total, parts=parts, error=error, traceback=traceback)
