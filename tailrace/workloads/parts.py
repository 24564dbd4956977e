"""Turns and tool calls: from columns of all parts to a list for each sample, and back."""

from collections.abc import Mapping, Sequence

import polars as pl

from tailrace.errors import TraceError
from tailrace.workloads.trace import TURN, Trace


def as_lists(columns: Mapping[str, object], kind: pl.Struct, counts: Sequence[int]) -> pl.Series:
    """Cut columns of parts into lists of structs, of `counts` parts each; null for a count of 0.

    Args:
        columns: fields of `kind`; a value that is no column is that of all parts, and a field without one is null.
    """
    whole = {field.name: columns.get(field.name) for field in kind.fields}
    parts = pl.DataFrame(whole, schema={field.name: field.dtype for field in kind.fields}).to_struct("part")
    rows = pl.DataFrame({"row": range(len(counts)), "count": counts})
    owners = rows.select(pl.col("row").repeat_by("count").explode().drop_nulls())
    lists = owners.with_columns(parts).group_by("row", maintain_order=True).agg("part")
    return rows.join(lists, on="row", how="left", maintain_order="left")["part"]


def turns_of(trace: Trace) -> pl.DataFrame:
    """Return one row a turn. A sample without details is one turn.

    The columns are those of a turn, and:

        row, prompt, step   the numbers of its sample, of its group and of its step
        turn                its number, from 0
        count               the turns of its sample
        context             tokens that the turn before has read and generated; null for the first turn
        added               tokens that came to the context since then; null for the first turn
    """
    one = pl.struct(
        "prompt_tokens",
        pl.lit(None, pl.Int32).alias("cached_tokens"),
        pl.col("response_tokens").alias("generated_tokens"),
        pl.lit(None, pl.Float64).alias("engine_s"),
    ).cast(TURN)
    lists = pl.coalesce("turns", pl.concat_list(one)).alias("turns")
    rows = numbered(trace).select("prompt", "step", lists).with_row_index("row")
    turns = rows.with_columns(pl.col("turns").list.len().alias("count")).explode("turns").unnest("turns")
    numbers = turns.with_columns(
        pl.int_range(pl.len()).over("row").alias("turn"),
        (pl.col("prompt_tokens") + pl.col("generated_tokens")).shift(1).over("row").alias("context"),
    )
    return numbers.with_columns((pl.col("prompt_tokens") - pl.col("context")).alias("added"))


def check_known(trace: Trace, turns: pl.DataFrame, need: str) -> None:
    """Check that the lengths of all turns are known. `need`: what needs them.

    Raises:
        TraceError: the tokens that a turn reads or generates are unknown.
    """
    for name in ("prompt_tokens", "generated_tokens"):
        if missing := turns[name].null_count():
            raise TraceError(f"{trace.provenance.source} has {missing} turns without {name}; {need} needs them")


def calls_of(trace: Trace) -> pl.DataFrame:
    """Return one row a call of a tool, with `row`, the number of its sample."""
    calls = trace.samples.select("tool_calls").with_row_index("row").explode("tool_calls").drop_nulls("tool_calls")
    return calls.unnest("tool_calls")


def numbered(trace: Trace) -> pl.DataFrame:
    """Return the samples with a column `prompt`: a number for each group of each step."""
    return trace.samples.with_columns(pl.struct("step", "group").rank("dense").alias("prompt"))
