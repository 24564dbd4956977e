"""Schema of a transfer queue's table: its tasks, what each reads and writes, and how each chooses rows."""

from typing import Annotated, Literal, Self

from pydantic import Field, Strict, model_validator

from tailrace.config.base import Config, Count, Listed, Processes
from tailrace.config.columns import COLUMNS, ColumnKind
from tailrace.config.transfer import ServiceQueueConfig


class FirstInConfig(Config):
    """Ready rows one by one, in the order of the run."""

    type: Literal["first_in"] = "first_in"
    max_rows: Count = 1
    """Rows of a claim at most."""


class OldestVersionConfig(Config):
    """Ready rows one by one, those that the oldest weights have made first."""

    type: Literal["oldest_version"] = "oldest_version"
    max_rows: Count = 1
    """Rows of a claim at most."""


class WholeGroupsConfig(Config):
    """Groups all of whose rows are ready, in the order in which they became so."""

    type: Literal["whole_groups"] = "whole_groups"
    max_groups: Count = 1
    """Groups of a claim at most."""


class TokenBudgetConfig(Config):
    """Whole groups gathered until the next would exceed a number of tokens, or the claim has as many rows as it may."""

    type: Literal["token_budget"] = "token_budget"
    tokens: Count | None = None
    """Tokens of a claim at most; by default there is no such bound."""
    window: Count | None = None
    """Rows, by their order in the run, that are handed out before any after them, so that a slow group holds those
    back: 1 is strictly in order, the rows of a training step let a group overtake others of its step. By default groups
    come as they become whole."""
    prompt_column: str = "prompt_ids"
    """The column whose elements are counted once in each group."""
    response_column: str = "response_ids"
    """The column whose elements are counted in each row."""


class BalancedConfig(Config):
    """Batches of whole groups, split among ranks so that all have equally much to do."""

    type: Literal["balanced"] = "balanced"
    ranks: Processes
    """Parts that a batch is split into."""
    rows: Count
    """Rows of a batch."""
    cost_columns: Listed[str] = ("prompt_ids", "response_ids")
    """The columns whose elements are what a row costs."""


PolicyConfig = Annotated[
    FirstInConfig | OldestVersionConfig | WholeGroupsConfig | TokenBudgetConfig | BalancedConfig,
    Field(discriminator="type"),
]
"""How a task chooses rows."""


class TaskConfig(Config):
    """One task of a table."""

    name: Annotated[str, Field(min_length=1)]
    """Unique in the table."""
    reads: Annotated[Listed[str], Field(min_length=1)]
    """Columns that a row must have before the task is handed it."""
    writes: Listed[str] = ()
    """Columns that the task's acks bring."""
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
    """What the cells of each column hold: `int64 array`, `float32 array`, `int`, `float`, `str` or `JSON value`. Where
    they are given, there are no others."""

    @model_validator(mode="after")
    def _counts_elements_of_arrays(self) -> Self:
        """Cells of other kinds have a length, too, but not one that says how much there is to do."""
        for task in self.tasks:
            for column in task.counted:
                kind = self.columns.get(column, ColumnKind.INTS)  # an unknown one is for `check_table`
                if kind not in (ColumnKind.INTS, ColumnKind.FLOATS):
                    raise ValueError(
                        f"has task {task.name!r}, whose policy {task.policy.type} counts the elements of {column!r}, "
                        f"but that column holds {kind}; name columns of arrays"
                    )
        return self


class ServeConfig(Config):
    """One `tailrace queue serve` of a table."""

    queue: ServiceQueueConfig = ServiceQueueConfig()
    table: TableConfig
