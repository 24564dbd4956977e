"""The tasks of several rewards (`rewards.graders`), in place of an algorithm's task of work `Grade`.

reward.math   prompt, answer, response, …           → reward.math, reward_error.math, reward_parts.math
reward.judge  prompt, answer, response, …           → reward.judge, …
reward        the columns of all rewards by name    → reward, reward_error, reward_parts

Each reward has a pool of its own. So a slow one holds back no other, and the sum follows row by row.
"""

from collections.abc import Iterator, Mapping, Sequence

from tailrace.algorithms.base import Algorithm
from tailrace.algorithms.table import AddUp, Grade, TableTask, single_rows
from tailrace.config.cluster import REWARD
from tailrace.config.columns import COLUMNS, ColumnKind

REWARD_COLUMNS = ("reward", "reward_error", "reward_parts")
"""The columns that a reward has: its own behind its name, and those of the sum."""


def reward_columns(name: str) -> tuple[str, ...]:
    """The columns of the reward of this name; those of a single one, or of the sum, where it is empty."""
    return tuple(f"{column}.{name}" if name else column for column in REWARD_COLUMNS)


class WithNamedRewards(Algorithm):
    """An algorithm with several rewards by name, of which it sees the sum."""

    def __init__(self, algorithm: Algorithm, names: Sequence[str]) -> None:
        self._algorithm = algorithm
        self._names = tuple(names)

    @property
    def tasks(self) -> tuple[TableTask, ...]:
        """The algorithm's table, with a task for each reward and one for their sum in the place of its grading."""
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
        """The algorithm's own columns, and those of each reward."""
        kinds = [COLUMNS[column] for column in REWARD_COLUMNS]
        own = {column: kind for name in self._names for column, kind in zip(reward_columns(name), kinds, strict=True)}
        return {**self._algorithm.columns, **own}

    def _graded(self, task: TableTask) -> Iterator[TableTask]:
        for name in self._names:
            yield TableTask(
                name=f"{task.name}.{name}",
                reads=task.reads,
                writes=reward_columns(name),
                work=Grade(name),
                claims=single_rows,
                pool=f"{REWARD}.{name}",
            )
        reads = tuple(column for name in self._names for column in reward_columns(name))
        yield TableTask(
            name=task.name, reads=reads, writes=task.writes, work=AddUp(), claims=single_rows, pool=task.pool
        )
