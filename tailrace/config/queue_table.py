"""Schema of a transfer queue's table: its tasks, the columns that each reads and writes, and how each chooses rows."""

from typing import Annotated, Literal, Self

from pydantic import Field, Strict, model_validator

from tailrace.config.base import Config, Count, Listed, Processes
from tailrace.config.columns import COLUMNS, ColumnKind
from tailrace.config.transfer import ServiceQueueConfig


class FirstInConfig(Config):
    """The policy that hands out ready rows one by one, in the order of the run."""

    type: Literal["first_in"] = "first_in"
    max_rows: Count = 1
    """Maximum number of rows of a claim."""


class OldestVersionConfig(Config):
    """The policy that hands out ready rows one by one, those made by the oldest weights first."""

    type: Literal["oldest_version"] = "oldest_version"
    max_rows: Count = 1
    """Maximum number of rows of a claim."""


class WholeGroupsConfig(Config):
    """The policy that hands out groups whose rows are all ready, in the order in which they became so."""

    type: Literal["whole_groups"] = "whole_groups"
    max_groups: Count = 1
    """Maximum number of groups of a claim."""


class TokenBudgetConfig(Config):
    """The policy that gathers whole groups until the next would exceed a number of tokens, or the claim has as many
    rows as it may."""

    type: Literal["token_budget"] = "token_budget"
    tokens: Count | None = None
    """Maximum number of tokens of a claim; by default there is no such bound."""
    window: Count | None = None
    """Size of the windows, in rows by their order in the run. All rows of a window are handed out before any later row,
    so a slow group holds back later windows. With 1, groups come strictly in order. With the rows of a training step, a
    group may overtake others of its step. By default groups come as they become whole."""
    prompt_column: str = "prompt_ids"
    """The column whose elements count once in each group."""
    response_column: str = "response_ids"
    """The column whose elements count in each row."""


class BalancedConfig(Config):
    """The policy that splits batches of whole groups among ranks, so that each rank has the same amount of work."""

    type: Literal["balanced"] = "balanced"
    ranks: Processes
    """Number of parts that a batch is split into."""
    rows: Count
    """Number of rows of a batch."""
    cost_columns: Listed[str] = ("prompt_ids", "response_ids")
    """The columns whose elements are the cost of a row."""


PolicyConfig = Annotated[
    FirstInConfig | OldestVersionConfig | WholeGroupsConfig | TokenBudgetConfig | BalancedConfig,
    Field(discriminator="type"),
]
"""The policy by which a task chooses rows."""


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
