"""Turns and tools, against values worked out by hand."""

from typing import Any

import polars as pl

from tailrace.workloads.characterization.tools import UNNAMED, Tools
from tailrace.workloads.characterization.turns import Turns
from tailrace.workloads.trace import COLUMNS


def turn(prompt: int | None, generated: int | None, cached: int | None = None) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "cached_tokens": cached, "generated_tokens": generated, "engine_s": None}


def call(name: str | None, seconds: float | None, returned: int | None = None, **more: Any) -> dict[str, Any]:
    parts = {"turn": 0, "name": name, "seconds": seconds, "returned_tokens": returned, "status": None, "cached": None}
    return parts | more


def samples(**columns: list[Any]) -> pl.DataFrame:
    return pl.DataFrame(columns, schema={name: COLUMNS[name].dtype for name in columns})


def test_turns_are_described_by_their_number_and_by_how_many_there_are() -> None:
    single, several = [turn(10, 600)], [turn(10, 100, 0), turn(200, 140, 50)]
    found = Turns.of(samples(turns=[single, several, several, None, []]))
    assert found is not None
    assert (found.counts.count, found.counts.mean) == (3, 5 / 3)
    first, second = found.by_turn
    assert first.generated_tokens is not None
    assert (first.turn, first.generated_tokens.mean, first.cached_share) == (0, 800 / 3, 0.0)
    assert (second.turn, second.cached_share) == (1, 0.25)
    one, two = found.by_count
    assert one.turn_tokens is not None
    assert two.turn_tokens is not None
    assert two.context_tokens is not None
    assert (one.turns, one.samples, one.turn_tokens.percentiles[50]) == (1, 1, 600.0)
    assert (two.turns, two.samples, two.turn_tokens.mean, two.context_tokens.mean) == (2, 2, 120.0, 200.0)
    assert found.context_tokens is not None
    assert found.context_tokens.mean == (10 + 200 + 200) / 3


def test_turns_without_lengths_are_counted() -> None:
    found = Turns.of(samples(turns=[[turn(None, None), turn(None, None)]]))
    assert found is not None
    assert (found.counts.mean, found.turn_tokens, found.by_turn[1].prompt_tokens) == (2.0, None, None)
    assert Turns.of(samples(turns=[None])) is None


def test_tools_are_described_by_name_with_the_most_called_first() -> None:
    calls = [
        [call("search", 0.5, 30, status="success"), call("search", 1.5, 50, status="failed", cached=True)],
        [call("search", 1.0, 40, status="success", cached=False), call(None, 0.25)],
        None,
    ]
    found = Tools.of(samples(tool_calls=calls))
    assert found is not None
    assert found.seconds is not None
    assert found.returned_tokens is not None
    assert (found.calls, found.seconds.count, found.returned_tokens.count) == (4, 4, 3)
    search, unnamed = found.by_name
    assert search.seconds is not None
    assert (search.name, search.calls, search.seconds.mean, search.cached_share) == ("search", 3, 1.0, 0.5)
    assert search.statuses == {"success": 2, "failed": 1}
    assert (unnamed.name, unnamed.calls, unnamed.returned_tokens, unnamed.statuses) == (UNNAMED, 1, None, {UNNAMED: 1})
    assert Tools.of(samples(tool_calls=[None, []])) is None
