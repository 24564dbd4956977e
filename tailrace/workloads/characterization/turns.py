"""Conversations: how lengths go with turns (PolyTrace, section 3.3, figures 12 and 15)."""

from collections.abc import Iterator
from typing import Self

import msgspec
import polars as pl

from tailrace.workloads.characterization.distribution import Distribution, known, mean
from tailrace.workloads.characterization.histogram import BinnedDistribution


class TurnFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The turns of one number. None where a trace does not say."""

    turn: int
    """From 0."""
    prompt_tokens: Distribution | None
    """Tokens that the model read: all that came before in the conversation."""
    generated_tokens: Distribution | None
    cached_share: float | None
    """The share of the read tokens that the cache held."""

    @classmethod
    def of(cls, turns: pl.DataFrame) -> Self:
        """Describe [n] turns of one number, one or more."""
        read = turns.filter(pl.col("cached_tokens").is_not_null(), pl.col("prompt_tokens") > 0)
        cached, whole = mean(read["cached_tokens"]), mean(read["prompt_tokens"])
        return cls(
            turn=int(turns["turn"][0]),
            prompt_tokens=Distribution.of(turns["prompt_tokens"].drop_nulls()),
            generated_tokens=Distribution.of(turns["generated_tokens"].drop_nulls()),
            cached_share=None if cached is None or whole is None else cached / whole,
        )


class TurnCountFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The samples with one number of turns. None where a trace does not say."""

    turns: int
    samples: int
    context_tokens: Distribution | None
    """Tokens that the model read in the last turn."""
    turn_tokens: Distribution | None
    """Tokens that the policy generated in one turn."""

    @classmethod
    def of(cls, turns: pl.DataFrame) -> Self:
        """Describe the turns of samples that have the same number of them."""
        count = int(turns["count"][0])
        last = turns.filter(pl.col("turn") == count - 1)
        return cls(
            turns=count,
            samples=len(last),
            context_tokens=Distribution.of(last["prompt_tokens"].drop_nulls()),
            turn_tokens=Distribution.of(turns["generated_tokens"].drop_nulls()),
        )


class Turns(msgspec.Struct, frozen=True, kw_only=True):
    """The turns of a trace."""

    counts: Distribution
    """Turns of a sample."""
    turn_tokens: BinnedDistribution | None
    """Tokens that the policy generated in one turn."""
    context_tokens: BinnedDistribution | None
    """Tokens that the model read in the last turn of a sample."""
    by_turn: list[TurnFigures]
    by_count: list[TurnCountFigures]

    @classmethod
    def of(cls, samples: pl.DataFrame) -> Self | None:
        """Describe the turns of [n] samples; None where none has details of its turns."""
        turns = _turns(samples)
        if turns.is_empty():
            return None
        last = turns.filter(pl.col("turn") == pl.col("count") - 1)
        return cls(
            counts=known(Distribution.of(last["count"])),
            turn_tokens=BinnedDistribution.binned(turns["generated_tokens"].drop_nulls()),
            context_tokens=BinnedDistribution.binned(last["prompt_tokens"].drop_nulls()),
            by_turn=[TurnFigures.of(part) for part in _parts(turns, "turn")],
            by_count=[TurnCountFigures.of(part) for part in _parts(turns, "count")],
        )


def _turns(samples: pl.DataFrame) -> pl.DataFrame:
    """A row for each turn, with its number and the number of turns of its sample."""
    counted = samples.select("turns", pl.col("turns").list.len().alias("count")).filter(pl.col("count") > 0)
    numbered = counted.with_columns(pl.int_ranges("count").alias("turn"))
    return numbered.explode("turns", "turn").unnest("turns")


def _parts(frame: pl.DataFrame, column: str) -> Iterator[pl.DataFrame]:
    yield from frame.sort(column, maintain_order=True).partition_by(column, maintain_order=True)
