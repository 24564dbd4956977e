"""Turns and tools (PolyTrace, section 3.3, figures 12 and 15)."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tailrace.report.charts import Figure
from tailrace.report.text import number, percent
from tailrace.report.workload.base import (
    MARKER,
    TOKENS,
    Workload,
    caption,
    count_axis,
    layout,
    line,
    log_axis,
    mean_of,
    share_axis,
    spread,
    told,
    values_of,
)
from tailrace.report.workload.lengths import density_figure
from tailrace.workloads.characterization.description import Description
from tailrace.workloads.characterization.distribution import Distribution
from tailrace.workloads.characterization.tools import UNNAMED, ToolFigures
from tailrace.workloads.characterization.turns import TurnCountFigures, TurnFigures, Turns

_LISTED_TOOLS = 12
"""The most tools of a trace in the table; those with the most calls."""


def turn_figures(shown: Sequence[Workload]) -> list[Figure | None]:
    """Return the charts of turns and tools, for the traces with details of them."""
    if not _conversations(shown):
        return tool_figures(shown)
    return [
        counts_figure(shown),
        by_turn_figure(shown),
        by_count_figure(
            shown,
            lambda part: part.context_tokens,
            id="context-by-count",
            title="Tokens read in the last turn",
            words="A point is the median of the samples with as many turns, a bar the middle 90 %.",
        ),
        by_count_figure(
            shown,
            lambda part: part.turn_tokens,
            id="generated-by-count",
            title="Tokens generated in a turn",
            words=told(shown, _single_and_several),
        ),
        *tool_figures(shown),
    ]


def tool_figures(shown: Sequence[Workload]) -> list[Figure | None]:
    """Return the histograms of what calls of tools take and return."""
    return [
        density_figure(
            shown,
            lambda description: None if description.tools is None else description.tools.seconds,
            id="tool-seconds",
            title="Time of a tool call",
            axis_title="Seconds",
        ),
        density_figure(
            shown,
            lambda description: None if description.tools is None else description.tools.returned_tokens,
            id="tool-tokens",
            title="Tokens that a tool call returns",
            axis_title=TOKENS,
        ),
    ]


def tool_table(shown: Sequence[Workload]) -> list[Mapping[str, str]]:
    """Return a row for each tool of each trace; of many, those with the most calls."""
    return [
        {"Tool": tool.name, "Trace": workload.name, **_row(tool)}
        for workload in shown
        if workload.description.tools is not None
        for tool in workload.description.tools.by_name[:_LISTED_TOOLS]
    ]


def counts_figure(shown: Sequence[Workload]) -> Figure:
    """Draw the share of samples by their number of turns."""
    data = [
        {
            "type": "bar",
            "name": workload.name,
            "x": [part.turns for part in _turns(workload).by_count],
            "y": [part.samples / workload.description.samples for part in _turns(workload).by_count],
            "marker": {"color": workload.colour},
            "hovertemplate": f"%{{x}} turns: %{{y:.1%}} of the samples<extra>{workload.name}</extra>",
        }
        for workload in _conversations(shown)
    ]
    return Figure(
        id="workload-turns",
        title="Number of turns",
        caption=told(shown, _most_turns),
        data=data,
        layout=layout(shown, _turns_axis("Turns of a sample", shown), share_axis("Samples"), bargap=0.2),
    )


def by_turn_figure(shown: Sequence[Workload]) -> Figure:
    """Draw what the model reads and generates in its first turn, its second, and so on."""
    lines = [drawn for workload in _conversations(shown) for drawn in _turn_lines(workload)]
    return Figure(
        id="workload-by-turn",
        title="Tokens of each turn",
        caption=caption("Mean tokens read; dashed: generated; dotted: read from the cache.", told(shown, _cached)),
        data=lines,
        layout=layout(shown, _turns_axis("Turn", shown), log_axis(TOKENS, values_of(lines, "y"))),
    )


def by_count_figure(
    shown: Sequence[Workload],
    of: Callable[[TurnCountFigures], Distribution | None],
    *,
    id: str,
    title: str,
    words: str,
) -> Figure:
    """Draw the spread of an amount for samples with one turn, with two, and so on."""
    data = [_by_count(workload, of) for workload in _conversations(shown)]
    return Figure(
        id=f"workload-{id}",
        title=title,
        caption=words,
        data=data,
        layout=layout(
            shown,
            _turns_axis("Turns of a sample", shown),
            log_axis(TOKENS, values_of(data, "y")),
            scattermode="group",
        ),
    )


def _by_count(workload: Workload, of: Callable[[TurnCountFigures], Distribution | None]) -> dict[str, Any]:
    found = [(part.turns, of(part)) for part in _turns(workload).by_count]
    known = [(turns, distribution.percentiles) for turns, distribution in found if distribution is not None]
    medians = [percentiles[50] for _, percentiles in known]
    points = line(workload, [turns for turns, _ in known], medians, "%{x} turns: median %{y:,.0f} tokens")
    marker = {"color": workload.colour, "size": MARKER}
    return points | {
        "mode": "markers",
        "marker": marker,
        "error_y": spread([each for _, each in known], workload.colour),
    }


def _conversations(shown: Sequence[Workload]) -> list[Workload]:
    return [workload for workload in shown if workload.description.turns is not None]


def _turn_lines(workload: Workload) -> list[dict[str, Any]]:
    turns = _turns(workload).by_turn
    x = [turn.turn + 1 for turn in turns]
    read = [mean_of(turn.prompt_tokens) for turn in turns]
    made = [mean_of(turn.generated_tokens) for turn in turns]
    cached = [_cached_tokens(turn) for turn in turns]
    return [
        line(workload, x, read, "turn %{x}: %{y:,.0f} tokens read"),
        line(workload, x, made, "turn %{x}: %{y:,.0f} tokens generated", dash="dash", label="generated"),
        line(workload, x, cached, "turn %{x}: %{y:,.0f} tokens from the cache", dash="dot", label="cached"),
    ]


def _cached_tokens(turn: TurnFigures) -> float | None:
    """Return the mean tokens of a turn from the cache; None where unknown, or none: the axis is logarithmic."""
    if not turn.cached_share or turn.prompt_tokens is None:
        return None
    return turn.cached_share * turn.prompt_tokens.mean


def _turns(workload: Workload) -> Turns:
    assert workload.description.turns is not None, workload.name
    return workload.description.turns


def _turns_axis(title: str, shown: Sequence[Workload]) -> dict[str, Any]:
    return count_axis(title, max(len(_turns(workload).by_turn) for workload in _conversations(shown)))


def _most_turns(description: Description) -> str:
    if description.turns is None:
        return ""
    counts = description.turns.counts
    return f"mean {number(counts.mean)} turns, p90 {number(counts.percentiles[90])}, most {number(counts.most)}"


def _cached(description: Description) -> str:
    later = description.turns.by_turn[1:] if description.turns else []
    read = [
        (turn.cached_share, turn.prompt_tokens.mean * turn.prompt_tokens.count) for turn in later if turn.prompt_tokens
    ]
    known = [(share, tokens) for share, tokens in read if share is not None]
    if not known:
        return ""
    cached = sum(share * tokens for share, tokens in known) / sum(tokens for _, tokens in known)
    return f"after the first turn the cache holds {percent(cached)} of what is read"


def _single_and_several(description: Description) -> str:
    """Say how many tokens a turn has in samples of one turn, and in those of several (PolyTrace, figure 15 b)."""
    medians = [
        (part.turns, part.samples, part.turn_tokens.percentiles[50])
        for part in (description.turns.by_count if description.turns else [])
        if part.turn_tokens is not None
    ]
    single = [median for turns, _, median in medians if turns == 1]
    several = [(samples, turns, median) for turns, samples, median in medians if turns > 1]
    if not single or not several:
        return ""
    _, turns, usual = max(several)  # the most frequent number of turns
    return f"median {number(single[0])} tokens in samples of one turn, {number(usual)} in those of {turns} turns"


def _row(tool: ToolFigures) -> dict[str, str]:
    known = {status: count for status, count in tool.statuses.items() if status != UNNAMED}
    return {
        "Calls": f"{tool.calls:,}",
        **_columns("Seconds", tool.seconds),
        **_columns("Tokens", tool.returned_tokens),
        "From a cache": "–" if tool.cached_share is None else percent(tool.cached_share),
        "Status": ", ".join(f"{status} {count:,}" for status, count in known.items()) or "–",
    }


def _columns(name: str, distribution: Distribution | None) -> dict[str, str]:
    parts = ("p50", "p90", "most")
    if distribution is None:
        return {f"{name}, {part}": "–" for part in parts}
    values = (*(distribution.percentiles[part] for part in (50, 90)), distribution.most)
    return {f"{name}, {part}": number(value) for part, value in zip(parts, values, strict=True)}
