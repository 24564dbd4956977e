"""The tasks of the rewards of a recipe, in place of an algorithm's task of work `Grade`.

reward.math   prompt, answer, response, …           → reward.math, reward_error.math, reward_parts.math
reward.judge  prompt, answer, response, …           → reward.judge, …
reward        the columns of all rewards by name    → reward, reward_error, reward_parts

Each of `rewards.graders` has a pool of its own. So a slow one holds back no other, and the sum follows row by row. A
grader that sees groups claims them as a whole.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from tailrace.algorithms.base import Algorithm
from tailrace.algorithms.table import AddUp, Grade, TableTask, one_group, single_rows
from tailrace.config.cluster import reward_pool
from tailrace.config.columns import COLUMNS, ColumnKind
from tailrace.config.rewards import RewardsConfig

REWARD_COLUMNS = ("reward", "reward_error", "reward_parts")
"""The columns that a reward has: its own behind its name, and those of the sum."""


def reward_columns(name: str) -> tuple[str, ...]:
    """The columns of the reward of this name; those of a single one, or of the sum, where it is empty."""
    return tuple(f"{column}.{name}" if name else column for column in REWARD_COLUMNS)


class WithRewards(Algorithm):
    """An algorithm with the rewards of a recipe. Its own tasks see one reward."""

    def __init__(self, algorithm: Algorithm, rewards: RewardsConfig) -> None:
        self._algorithm = algorithm
        self._rewards = rewards

    @property
    def tasks(self) -> tuple[TableTask, ...]:
        """The algorithm's table, with the tasks of the rewards in the place of its grading."""
        return tuple(
            own
            for task in self._algorithm.tasks
            for own in (self._graded(task) if isinstance(task.work, Grade) else (task,))
        )

    @property
    def group_size(self) -> int:
        """The algorithm's group size."""
        return self._algorithm.group_size

    @property
    def columns(self) -> Mapping[str, ColumnKind]:
        """The algorithm's own columns, and those of each reward by name."""
        own = {
            named: COLUMNS[column]
            for name in self._rewards.graders
            for named, column in zip(reward_columns(name), REWARD_COLUMNS, strict=True)
        }
        return {**self._algorithm.columns, **own}

    def _graded(self, task: TableTask) -> Iterator[TableTask]:
        for name, grading in self._rewards.each.items():
            claims = one_group if grading.sees_groups else task.claims
            if not name:
                yield replace(task, claims=claims)
                return
            yield replace(
                task,
                name=f"{task.name}.{name}",
                writes=reward_columns(name),
                work=Grade(name),
                claims=claims,
                pool=reward_pool(name),
            )
        reads = tuple(column for name in self._rewards.graders for column in reward_columns(name))
        yield replace(task, reads=reads, work=AddUp(), claims=single_rows)
