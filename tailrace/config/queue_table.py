"""Schema of a transfer queue's table: its tasks, what each reads and writes, and how each chooses rows."""

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from tailrace.config.base import Config
from tailrace.config.transfer import ServiceQueueConfig
from tailrace.types import COLUMNS, ColumnKind


class FirstInConfig(Config):
    """Ready rows one by one, in the order of the run."""

    type: Literal["first_in"] = "first_in"
    max_rows: PositiveInt = 1
    """Rows of a claim at the most."""


class OldestVersionConfig(Config):
    """Ready rows one by one, those that the oldest weights have made first."""

    type: Literal["oldest_version"] = "oldest_version"
    max_rows: PositiveInt = 1
    """Rows of a claim at the most."""


class WholeGroupsConfig(Config):
    """Groups all of whose rows are ready, in the order in which they became so."""

    type: Literal["whole_groups"] = "whole_groups"
    max_groups: PositiveInt = 1
    """Groups of a claim at the most."""


class TokenBudgetConfig(Config):
    """Whole groups gathered until the next would exceed a number of tokens, or the claim has as many rows as it may."""

    type: Literal["token_budget"] = "token_budget"
    tokens: PositiveInt | None = None
    """Tokens of a claim at the most; by default there is no such bound."""
    in_order: bool = False
    """Whether groups come strictly in the order of the run, so that a slow one is waited for."""
    prompt_column: str = "prompt_ids"
    """The column whose elements are counted once in each group."""
    response_column: str = "response_ids"
    """The column whose elements are counted in each row."""


class BalancedConfig(Config):
    """Batches of whole groups, split among ranks so that all have equally much to do."""

    type: Literal["balanced"] = "balanced"
    ranks: PositiveInt
    """Parts that a batch is split into."""
    rows: PositiveInt
    """Rows of a batch."""
    cost_columns: tuple[str, ...] = ("prompt_ids", "response_ids")
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
    reads: tuple[str, ...]
    """Columns that a row must have before the task is handed it."""
    writes: tuple[str, ...] = ()
    """Columns that the task's acks bring."""
    policy: PolicyConfig = FirstInConfig()


class TableConfig(Config):
    """The table of a queue."""

    tasks: Annotated[tuple[TaskConfig, ...], Field(min_length=1)]
    columns: dict[str, ColumnKind] = dict(COLUMNS)
    """What the cells of each column hold."""


class ServeConfig(Config):
    """One `tailrace queue serve` of a table."""

    queue: ServiceQueueConfig = ServiceQueueConfig()
    table: TableConfig
