"""Fits conversations: numbers of turns, tokens of turns, tools, and what the engine's cache holds."""

import polars as pl
from scipy import stats

from tailrace.workloads.fits.amounts import as_floats, choose_known, fit_amount, prompt_share, with_share
from tailrace.workloads.fits.choice import choose
from tailrace.workloads.marginals.shares import Shares
from tailrace.workloads.parameters import Amount, Tool, Turns
from tailrace.workloads.parts import calls_of, check_known, turns_of
from tailrace.workloads.trace import Trace

_ENOUGH = 200
"""The least turns of one number that have a distribution of their own."""
_CHANCE = 0.01
"""The probability of as different distributions by chance, below which two numbers of turns differ."""


def has_turns(trace: Trace) -> bool:
    """Whether a trace has samples of two turns and more."""
    return bool((trace.samples["turns"].list.len() > 1).any())


def fit_turns(trace: Trace, family: str) -> Turns:
    """Fit the conversations of a trace that has them.

    Raises:
        TraceError: the tokens of a turn are unknown.
        FitError: see `choose`.
    """
    turns = turns_of(trace).with_columns(pl.col("generated_tokens").clip(1))
    check_known(trace, turns, "a fit")
    is_final = pl.col("turn") == pl.col("count") - 1
    first, final, calling = turns.filter(pl.col("turn") == 0), turns.filter(is_final), turns.filter(~is_final)
    calls, counts = calls_of(trace), as_floats(first["count"])
    return Turns(
        count=with_share(Shares.fit(counts), prompt_share(counts, first)),
        calling=_by_number(calling, "turn", 0, family),
        final=_by_number(final, "count", 1, family),
        turn_correlation=_correlation(turns),
        tool=_tool(calls, turns["added"].drop_nulls(), family),
        template_tokens=_template(calls, turns),
        first_cached_share=_held(first["cached_tokens"], first["prompt_tokens"]),
        later_cached_share=_held(turns["cached_tokens"], turns["context"]),
    )


def _by_number(turns: pl.DataFrame, number: str, first: int, family: str) -> list[Amount]:
    """Fit turns by the column `number`, from `first` on. Numbers are fitted together until they are many, and differ
    from all larger ones."""
    amounts: list[Amount] = []
    for value in range(first, int(turns[number].max())):  # type: ignore[arg-type]
        here, later = turns.filter(pl.col(number) <= value), turns.filter(pl.col(number) > value)
        if _differ(here["generated_tokens"], later["generated_tokens"]):
            amounts += [_amount(here, family)] * (value + 1 - first - len(amounts))
            turns = later
    return [*amounts, _amount(turns, family)]


def _amount(turns: pl.DataFrame, family: str) -> Amount:
    """Fit the tokens of turns. What their prompts explain is told by one turn of each sample: turns of one sample are
    alike for another reason (`turn_correlation`).
    """
    firsts = turns.unique("row", keep="first", maintain_order=True)
    share = prompt_share(as_floats(firsts["generated_tokens"]), firsts)
    return fit_amount(as_floats(turns["generated_tokens"]), turns["prompt"], share, family)


def _correlation(turns: pl.DataFrame) -> float:
    """Return the rank correlation of calling turns with the last turn of their samples, 0 where it is negative.

    Ranks are among the turns of one number in conversations of as many turns, which differ in their lengths. What a
    prompt has in common is taken from them, unless each has one sample alone.
    """
    ranks = turns.with_columns((pl.col("generated_tokens").rank() / pl.len()).over("count", "turn").alias("rank"))
    pairs = ranks.with_columns(pl.col("rank").last().over("row").alias("last")).filter(
        pl.col("turn") < pl.col("count") - 1
    )
    if turns["row"].n_unique() > turns["prompt"].n_unique():
        both = pl.col("rank", "last")
        pairs = pairs.with_columns(both - both.mean().over("prompt", "count", "turn"))
    found = pairs.select(pl.corr("rank", "last")).item()
    return 0.0 if found is None else max(0.0, float(found))


def _differ(here: pl.Series, later: pl.Series) -> bool:
    return min(len(here), len(later)) >= _ENOUGH and stats.ks_2samp(here, later).pvalue < _CHANCE


def _tool(calls: pl.DataFrame, added: pl.Series, family: str) -> Tool:
    """Fit the calls. Where a trace does not say what they have returned, it is what the next turn reads in addition."""
    returned = calls["returned_tokens"].drop_nulls()
    names = calls["name"].unique()
    hits, misses = calls.filter(pl.col("cached")), calls.filter(pl.col("cached").is_null() | ~pl.col("cached"))
    share = calls["cached"].mean()
    return Tool(
        name=names[0] if len(names) == 1 else None,
        returned_tokens=choose(as_floats(returned if len(returned) else added.clip(0)), family),
        seconds=choose_known(misses["seconds"], family),
        hit_share=None if share is None else float(share),  # type: ignore[arg-type]
        hit_seconds=choose_known(hits["seconds"], family),
    )


def _template(calls: pl.DataFrame, turns: pl.DataFrame) -> int:
    """Return the median of the tokens that come to the context before a turn, beyond what calls have returned."""
    returned = calls.group_by("row", pl.col("turn").cast(pl.Int64) + 1).agg(pl.col("returned_tokens").sum())
    joined = turns.select("row", "turn", "added").join(returned, on=["row", "turn"])
    beyond = (joined["added"] - joined["returned_tokens"]).median()
    return 0 if beyond is None else max(0, round(float(beyond)))  # type: ignore[arg-type]


def _held(cached: pl.Series, tokens: pl.Series) -> float | None:
    """Return the share of tokens that the cache held, over all turns where both are known."""
    known = pl.DataFrame({"cached": cached, "tokens": tokens}).drop_nulls()
    return min(1.0, float(known["cached"].sum()) / float(known["tokens"].sum())) if len(known) else None
