"""The reward tasks: one grades responses in worker processes, one adds up several rewards."""

import math
from collections.abc import Mapping
from typing import Any, cast

from tailrace.algorithms.rewards import reward_columns
from tailrace.events import Event
from tailrace.rewards.base import FailureReport, Grade, GradingRequest
from tailrace.rewards.graders import added_up
from tailrace.rewards.pool import GraderPool
from tailrace.rewards.spending import spent_metrics
from tailrace.tasks.base import Outputs, Task
from tailrace.tasks.context import TaskContext
from tailrace.transfer.queue.base import Claim, Row
from tailrace.types import Value


class RewardTask(Task):
    """Writes the columns of a reward: the number, its error, its parts.

    The error is empty unless the grading failed; then the reward is the configured one, or NaN. As many claims are
    graded at a time as the pool grades, so that a slow one holds back no other.
    """

    def __init__(self, context: TaskContext, name: str, pool: GraderPool, reward: str = "") -> None:
        """`name`: see `Task`. `pool`: the grading processes. `reward`: its name; see `RewardsConfig.each`."""
        grading = context.config.rewards.each[reward]
        super().__init__(context, name, workers=pool.capacity)
        self._pool = pool
        self._columns = reward_columns(reward)
        self._failures = FailureReport()
        self._group_size = context.config.algorithm.group_size
        self._sees_groups = grading.sees_groups
        self._on_failure = grading.failure_reward

    async def compute(self, claim: Claim, span: Event) -> Outputs:
        """Grade the rows of the claim: a group, or mostly one row."""
        requests = [grading_request(row) for row in claim.rows]
        with self._activity.busy("reward"):
            if self._sees_groups:
                grades = await self._pool.grade_all(requests)
            else:
                grades = [await self._pool.grade(request) for request in requests]
        graded = [told(row, grade.reward, self._group_size) for row, grade in zip(claim.rows, grades, strict=True)]
        span.info = {**self._failures.info(grades), "graded": graded}
        span.metrics = spent_metrics(grades)
        return {row.id: self._cells(grade) for row, grade in zip(claim.rows, grades, strict=True)}

    def _cells(self, grade: Grade) -> dict[str, Value]:
        reward = self._on_failure if grade.reward is None else grade.reward
        return cells_of(Grade(reward=reward, parts=grade.parts, error=grade.error), self._columns)


class SumTask(Task):
    """Writes the columns of the sum of the rewards by name."""

    def __init__(self, context: TaskContext, name: str) -> None:
        """`name`: see `Task`."""
        super().__init__(context, name)
        self._config = context.config.rewards
        self._group_size = context.config.algorithm.group_size

    async def compute(self, claim: Claim, span: Event) -> Outputs:
        """Add up the rewards of each row of the claim; it usually has one."""
        sums = [
            added_up({name: grade_of(row, name) for name in self._config.graders}, self._config) for row in claim.rows
        ]
        span.info = {
            "graded": [told(row, one.reward, self._group_size) for row, one in zip(claim.rows, sums, strict=True)]
        }
        return {row.id: cells_of(one, reward_columns("")) for row, one in zip(claim.rows, sums, strict=True)}


def told(row: Row, reward: float | None, group_size: int) -> tuple[int, int, float | None]:
    """Group, number in it, and reward of a row: the trace of a run finds its rewards by them."""
    return row.group_id, row.order % group_size, reward


def cells_of(grade: Grade, columns: tuple[str, ...]) -> dict[str, Value]:
    """The cells of a grade; a reward that is missing is NaN."""
    reward = math.nan if grade.reward is None else grade.reward
    return dict(zip(columns, (reward, grade.error or "", dict(grade.parts)), strict=True))


def grade_of(row: Row, reward: str) -> Grade:
    """The grade whose cells `cells_of` has made. `reward`: its name."""
    number, error, parts = (row.cells[column] for column in reward_columns(reward))
    known = None if math.isnan(cast(float, number)) else cast(float, number)
    return Grade(reward=known, parts=cast("Mapping[str, float]", parts), error=cast(str, error) or None)


def grading_request(row: Row) -> GradingRequest:
    """Make the grader's request from a row."""
    cells = cast("dict[str, Any]", row.cells)
    return GradingRequest(
        prompt=cells["prompt"],
        question=cells["question"],
        response=cells["response"],
        answer=cells["answer"],
        metadata=cells["metadata"],
        tokens=cells["response_ids"].tolist(),
        finish_reason=cells["finish_reason"],
    )
