"""The interface of an algorithm: a table of tasks.

An algorithm is made, and its table read, without PyTorch: a process that needs no more starts sooner.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping

from tailrace.algorithms.table import TableTask, Train
from tailrace.config.columns import ColumnKind


class Algorithm(ABC):
    """An algorithm, which is a table of tasks."""

    @property
    @abstractmethod
    def tasks(self) -> tuple[TableTask, ...]:
        """The table: one task generates, one trains the policy, the others are between them or train other models."""

    @property
    @abstractmethod
    def group_size(self) -> int:
        """Number of samples of a prompt."""

    @property
    def columns(self) -> Mapping[str, ColumnKind]:
        """The type of cell of each column that its tasks use beside `tailrace.config.columns.COLUMNS`."""
        return {}

    def pools(self) -> tuple[str, ...]:
        """The kinds of worker processes of its tasks, in the order of the table."""
        return tuple(dict.fromkeys(task.pool for task in self.tasks))

    def policy_task(self) -> tuple[TableTask, Train]:
        """The task that trains the policy, and its work."""
        ((task, work),) = ((task, work) for task, work in self.trained() if work.make_trainer is None)
        return task, work

    def other_models(self) -> tuple[tuple[TableTask, Train], ...]:
        """The tasks that train other models, and their work."""
        return tuple((task, work) for task, work in self.trained() if work.make_trainer is not None)

    def trained(self) -> Iterator[tuple[TableTask, Train]]:
        """The tasks that train, and their work."""
        return ((task, task.work) for task in self.tasks if isinstance(task.work, Train))
