"""The reward task: grades responses in worker processes."""

from typing import Any, cast

from tailrace.events import Event
from tailrace.rewards.base import FailureReport, Grade, GradingRequest
from tailrace.rewards.pool import GraderPool
from tailrace.tasks.base import Outputs, Task
from tailrace.tasks.context import TaskContext
from tailrace.transfer.queue.base import Claim, Row
from tailrace.types import Value


class RewardTask(Task):
    """Writes `reward`, `reward_parts` and `reward_error` of each row.

    `reward_error` is empty unless the grading failed; then the reward is the configured one, or NaN. As many claims are
    graded at a time as the pool grades, so that a slow one holds back no other.
    """

    def __init__(self, context: TaskContext, name: str, pool: GraderPool) -> None:
        """`name`: see `Task`. `pool`: the grading processes."""
        super().__init__(context, name, workers=pool.capacity)
        self._pool = pool
        self._failures = FailureReport()
        self._group_size = context.config.algorithm.group_size
        configured = context.config.rewards.failure_reward
        self._on_failure = float("nan") if configured is None else configured

    async def compute(self, claim: Claim, span: Event) -> Outputs:
        """Grade the rows of the claim; it usually has one."""
        with self._activity.busy("reward"):
            grades = [await self._pool.grade(grading_request(row)) for row in claim.rows]
        graded = [self._graded(row, grade) for row, grade in zip(claim.rows, grades, strict=True)]
        span.info = {**self._failures.info(grades), "graded": graded}
        return {row.id: self._cells(grade) for row, grade in zip(claim.rows, grades, strict=True)}

    def _graded(self, row: Row, grade: Grade) -> tuple[int, int, float | None]:
        """Group, number in it, and reward of a row: the trace of a run finds its rewards by them."""
        return row.group_id, row.order % self._group_size, grade.reward

    def _cells(self, grade: Grade) -> dict[str, Value]:
        reward = self._on_failure if grade.reward is None else grade.reward
        return {"reward": reward, "reward_error": grade.error or "", "reward_parts": dict(grade.parts)}


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
