"""Calls of tools: how long they take and how much they return (PolyTrace, section 3.3, figure 12 d)."""

from typing import Self

import msgspec
import polars as pl

from tailrace.workloads.characterization.distribution import Distribution, mean
from tailrace.workloads.characterization.histogram import BinnedDistribution

UNNAMED = "(no name)"
"""Stands for the name of a tool, or a status, that a trace does not say."""


class ToolFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The calls of one tool."""

    name: str
    calls: int
    seconds: Distribution | None
    returned_tokens: Distribution | None
    cached_share: float | None
    """The share of calls that a cache answered, of those that say."""
    statuses: dict[str, int]
    """The number of calls that ended with each status."""

    @classmethod
    def of(cls, calls: pl.DataFrame) -> Self:
        """Describe [n] calls of one tool, one or more."""
        return cls(
            name=calls["name"][0],
            calls=len(calls),
            seconds=Distribution.of(calls["seconds"].drop_nulls()),
            returned_tokens=Distribution.of(calls["returned_tokens"].drop_nulls()),
            cached_share=mean(calls["cached"]),
            statuses=dict(calls["status"].fill_null(UNNAMED).value_counts(sort=True).iter_rows()),
        )


class Tools(msgspec.Struct, frozen=True, kw_only=True):
    """The calls of tools of a trace."""

    calls: int
    seconds: BinnedDistribution | None
    returned_tokens: BinnedDistribution | None
    by_name: list[ToolFigures]
    """The tool with the most calls first."""

    @classmethod
    def of(cls, samples: pl.DataFrame) -> Self | None:
        """Describe the calls of [n] samples; None where there are none."""
        calls = samples["tool_calls"].drop_nulls().explode().drop_nulls().struct.unnest()
        if calls.is_empty():
            return None
        named = calls.with_columns(pl.col("name").fill_null(UNNAMED)).sort("name", maintain_order=True)
        by_name = [ToolFigures.of(part) for part in named.partition_by("name", maintain_order=True)]
        return cls(
            calls=len(calls),
            seconds=BinnedDistribution.binned(calls["seconds"].drop_nulls(), whole=False),
            returned_tokens=BinnedDistribution.binned(calls["returned_tokens"].drop_nulls()),
            by_name=sorted(by_name, key=lambda tool: -tool.calls),
        )
