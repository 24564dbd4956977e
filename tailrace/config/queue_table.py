"""Schema of a transfer queue's table: its tasks, the columns that each reads and writes, and how each chooses rows."""

from typing import Annotated, Self

from pydantic import Field, Strict, model_validator

from tailrace.config.base import Config, Listed
from tailrace.config.columns import COLUMNS, ColumnKind
from tailrace.config.queue_policies import BalancedConfig, FirstInConfig, PolicyConfig, TokenBudgetConfig
from tailrace.config.transfer import ArenaStorageConfig, ListenAddress, ServiceQueueConfig, StorageConfig


class TaskConfig(Config):
    """A task of a table."""

    name: Annotated[str, Field(min_length=1)]
    """Name of the task, unique in the table."""
    reads: Annotated[Listed[str], Field(min_length=1)]
    """Columns that a row must have before the task can claim it."""
    writes: Listed[str] = ()
    """Columns that the task's acks write."""
    policy: PolicyConfig = FirstInConfig()

    @property
    def counted(self) -> tuple[str, ...]:
        """The columns whose elements the policy counts."""
        match self.policy:
            case TokenBudgetConfig(tokens=int()):
                return (self.policy.prompt_column, self.policy.response_column)
            case BalancedConfig():
                return self.policy.cost_columns
            case _:
                return ()


class TableConfig(Config):
    """The table of a queue."""

    tasks: Annotated[Listed[TaskConfig], Field(min_length=1)]
    columns: dict[str, Annotated[ColumnKind, Strict(False)]] = dict(COLUMNS)
    """The contents of each column's cells: `int64 array`, `float32 array`, `int`, `float`, `str` or `JSON value`. If
    given, there are no other columns."""

    @model_validator(mode="after")
    def _counts_elements_of_arrays(self) -> Self:
        """Check that policies count elements of arrays. Other cells have a length, too, but it does not say how much
        work there is."""
        for task in self.tasks:
            for column in task.counted:
                kind = self.columns.get(column, ColumnKind.INTS)  # `check_table` refuses unknown columns
                if kind not in (ColumnKind.INTS, ColumnKind.FLOATS):
                    raise ValueError(
                        f"has task {task.name!r}, whose policy {task.policy.type} counts the elements of {column!r}, "
                        f"but that column holds {kind}; name columns of arrays"
                    )
        return self


class ServeConfig(Config):
    """The configuration of `tailrace queue serve` for a table."""

    queue: ServiceQueueConfig = ServiceQueueConfig()
    table: TableConfig


class AddedUnitConfig(Config):
    """The configuration of `tailrace queue add-unit`, a storage unit for a running queue."""

    storage: StorageConfig = ArenaStorageConfig()
    """Where the unit keeps cells."""
    listen: ListenAddress = "127.0.0.1"
    """Address of this machine at which the unit listens, at a free port. On another machine than the queue's, one at
    which the queue and its clients reach it."""
