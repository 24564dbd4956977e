"""How varied responses are: their tail, and how they go with prompts and rewards (PolyTrace, figures 4, 8, 13, 17)."""

from collections.abc import Mapping, Sequence
from typing import Any

from tailrace.registers.events import GREEN, GREY, RED
from tailrace.report.charts import Figure, axis
from tailrace.report.text import number
from tailrace.report.workload.base import (
    MARKER,
    TALL,
    TOKENS,
    Workload,
    caption,
    heat,
    layout,
    line,
    log_axis,
    spread,
    titled,
    told,
    values_of,
)
from tailrace.report.workload.lengths import cumulative
from tailrace.workloads.characterization.description import Description

_LONGER = "%{y:.3~%} are longer than %{x:,} tokens"


def variety_figures(shown: Sequence[Workload]) -> list[Figure | None]:
    """Return the tail of the responses, how they go with prompts, and how with rewards."""
    return [tail_figure(shown), *(joint_figure(shown, workload) for workload in shown), rewards_figure(shown)]


def tail_figure(shown: Sequence[Workload]) -> Figure:
    """Draw the share of responses that are longer than a length, both on logarithmic axes."""
    data = []
    for workload in shown:
        edges, below = cumulative(workload.description.response_tokens.histogram)
        rest = [(edge, 1 - share) for edge, share in zip(edges, below, strict=True) if share < 1 - 1e-9]
        data.append(line(workload, [edge for edge, _ in rest], [share for _, share in rest], _LONGER))
    return Figure(
        id="workload-tail",
        title="The tail of the responses",
        caption=caption(
            told(shown, _tail, about="Longest over 90th percentile"),
            "A line that falls slowly on the right is a long tail.",
        ),
        data=data,
        layout=layout(
            shown,
            log_axis(TOKENS, values_of(data, "x")),
            log_axis("Share of longer ones", values_of(data, "y"), tickformat=".3~%"),
        ),
        height=TALL,
    )


def joint_figure(shown: Sequence[Workload], workload: Workload) -> Figure:
    """Draw the samples of a trace by the lengths of prompt and response."""
    joint = workload.description.joint
    counts = [[count or None for count in row] for row in joint.counts]
    places = {"x": joint.prompt_edges, "y": joint.response_edges}
    return Figure(
        id=f"workload-joint-{shown.index(workload)}",
        title=titled("Prompt and response", shown, workload),
        caption=_correlation(workload.description),
        data=[heat(counts, "samples", "about %{x:,.3~r} and %{y:,.3~r} tokens", **places)],
        layout=layout(
            [], log_axis("Prompt (tokens)", joint.prompt_edges), log_axis("Response (tokens)", joint.response_edges)
        ),
        height=TALL,
    )


def rewards_figure(shown: Sequence[Workload]) -> Figure | None:
    """Draw how long the correct and the wrong responses of each trace are; None where no trace has rewards."""
    found = [
        (_colour_and_name(kind, workload, shown), distribution.percentiles)
        for workload in shown
        for kind, distribution in (("correct", workload.description.correct), ("wrong", workload.description.wrong))
        if distribution is not None
    ]
    if not found:
        return None
    data = _medians(found)
    return Figure(
        id="workload-rewards",
        title="Correct and wrong responses",
        caption=caption(
            "A point is the median, a bar the middle 90 %.", told(shown, _correct_and_wrong, about="Mean tokens")
        ),
        data=[data],
        layout=layout(
            [],
            log_axis(TOKENS, values_of([data], "x")),
            axis("Responses", type="category", showgrid=False, autorange="reversed"),
        ),
        wide=True,
        height=100 + 36 * len(found),
    )


def _medians(found: Sequence[tuple[tuple[str, str], Mapping[int, float]]]) -> dict[str, Any]:
    """Return points at medians, each with a colour, a name and percentiles."""
    return {
        "type": "scatter",
        "mode": "markers",
        "x": [percentiles[50] for _, percentiles in found],
        "y": [name for (_, name), _ in found],
        "marker": {"color": [colour for (colour, _), _ in found], "size": MARKER},
        "error_x": spread([percentiles for _, percentiles in found], GREY),
        "hovertemplate": "%{y}: median %{x:,.0f} tokens<extra></extra>",
    }


def _colour_and_name(kind: str, workload: Workload, shown: Sequence[Workload]) -> tuple[str, str]:
    return (GREEN if kind == "correct" else RED), titled(kind, shown, workload)


def _tail(description: Description) -> str:
    return f"{description.response_tokens.tail:.1f}"


def _correlation(description: Description) -> str:
    correlation = description.correlation
    if correlation is None:
        return "One of the two lengths never varies, so they cannot go together."
    size = abs(correlation.spearman)
    words = "tells hardly anything" if size < 0.2 else "tells something" if size < 0.5 else "tells much"
    return (
        f"The length of a prompt {words} about its response: correlation {correlation.pearson:.2f}, of ranks "
        f"{correlation.spearman:.2f}."
    )


def _correct_and_wrong(description: Description) -> str:
    correct, wrong = description.correct, description.wrong
    if correct is None or wrong is None:
        return ""
    return f"correct {number(correct.mean)}, wrong {number(wrong.mean)}"
