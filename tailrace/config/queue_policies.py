"""Schemas of the policies by which a task of a transfer queue chooses rows."""

from typing import Annotated, Literal

from pydantic import Field

from tailrace.config.base import Config, Count, Listed, Processes


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
