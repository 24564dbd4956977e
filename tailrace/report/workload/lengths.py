"""How long prompts and responses are (PolyTrace, figures 3, 9, 12 and 16)."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tailrace.report.charts import Figure, axis
from tailrace.report.text import number, percent
from tailrace.report.workload.base import (
    TOKENS,
    Workload,
    caption,
    faint,
    layout,
    line,
    log_axis,
    share_axis,
    told,
    values_of,
)
from tailrace.workloads.characterization.description import Description
from tailrace.workloads.characterization.distribution import Distribution
from tailrace.workloads.characterization.histogram import BinnedDistribution, Histogram

Amount = Callable[[Description], BinnedDistribution | None]


def length_figures(shown: Sequence[Workload]) -> list[Figure | None]:
    """Return the histograms and the cumulative distributions of prompts and responses."""
    return [
        density_figure(shown, _prompts, id="prompts", title="Prompt lengths", axis_title=TOKENS),
        density_figure(shown, _responses, id="responses", title="Response lengths", axis_title=TOKENS),
        cumulative_figure(shown, _prompts, id="prompts-cumulative", title="Prompt lengths, cumulative"),
        cumulative_figure(shown, _responses, id="responses-cumulative", title="Response lengths, cumulative"),
    ]


def length_table(shown: Sequence[Workload]) -> list[Mapping[str, str]]:
    """Return a row of figures for the prompts, and one for the responses, of each trace."""
    kinds: tuple[tuple[str, Amount], ...] = (("prompts", _prompts), ("responses", _responses))
    return [
        {"Trace": workload.name, "Tokens of": kind, **_row(distribution)}
        for workload in shown
        for kind, amount in kinds
        if (distribution := amount(workload.description)) is not None
    ]


def density_figure(shown: Sequence[Workload], amount: Amount, *, id: str, title: str, axis_title: str) -> Figure | None:
    """Draw the histogram of an amount of each trace on a logarithmic axis; None where no trace has it.

    The height of a bin is its share over its width on the axis. The highest bin of each trace has the height 1, since a
    narrow distribution would hide all others.
    """
    data = [_density(workload, distribution) for workload, distribution in _having(shown, amount)]
    if not data:
        return None
    return Figure(
        id=f"workload-{id}",
        title=title,
        caption=told(shown, lambda description: _middle_and_end(amount(description)), about=axis_title),
        data=data,
        layout=layout(
            shown, log_axis(axis_title, values_of(data, "x")), axis("Density (highest is 1)", rangemode="tozero")
        ),
    )


def _density(workload: Workload, distribution: BinnedDistribution) -> dict[str, Any]:
    edges, heights = _outline(distribution.histogram)
    shares = [0.0, *distribution.histogram.shares, 0.0]
    drawn = line(workload, edges, heights, "from %{x:,.4~g}: %{customdata:.1%}", width=1.6, shape="hv")
    return drawn | {"customdata": shares, "fill": "tozeroy", "fillcolor": faint(workload.colour)}


def cumulative_figure(shown: Sequence[Workload], amount: Amount, *, id: str, title: str) -> Figure:
    """Draw the share of the values of each trace that are below a length."""
    data = [
        line(workload, *cumulative(distribution.histogram), "below %{x:,} tokens: %{y:.1%}")
        for workload, distribution in _having(shown, amount)
    ]
    return Figure(
        id=f"workload-{id}",
        title=title,
        caption=caption(
            "The steeper the line, the more alike the lengths.",
            told(shown, lambda description: _middle_half(amount(description)), about="The middle half, in tokens"),
        ),
        data=data,
        layout=layout(shown, log_axis(TOKENS, values_of(data, "x")), share_axis("Share below")),
    )


def _prompts(description: Description) -> BinnedDistribution:
    return description.prompt_tokens


def _responses(description: Description) -> BinnedDistribution:
    return description.response_tokens


def _having(shown: Sequence[Workload], amount: Amount) -> list[tuple[Workload, BinnedDistribution]]:
    found = [(workload, amount(workload.description)) for workload in shown]
    return [(workload, distribution) for workload, distribution in found if distribution is not None]


def _row(distribution: Distribution) -> dict[str, str]:
    return {
        "Mean": number(distribution.mean),
        **{f"p{part}": number(distribution.percentiles[part]) for part in (5, 50, 90, 99)},
        "Longest": number(distribution.most),
        "Longest over p90": f"{distribution.tail:.1f}",
        "p90 over longest": percent(1 / distribution.tail) if distribution.tail else "–",
        "Standard deviation": number(distribution.deviation),
        "Over mean": f"{distribution.variation:.2f}",
    }


def _outline(histogram: Histogram) -> tuple[list[float], list[float]]:
    """Return the edges, and the height of the bin that begins at each; the outline begins and ends at 0."""
    edges = np.asarray(histogram.edges)
    densities = np.asarray(histogram.shares) / np.log2(edges[1:] / edges[:-1])
    return [histogram.edges[0], *histogram.edges], [0.0, *(densities / densities.max()).tolist(), 0.0]


def cumulative(histogram: Histogram) -> tuple[list[float], list[float]]:
    """Return the edges of a histogram, and the share of the values below each."""
    return histogram.edges, [0.0, *np.cumsum(histogram.shares).tolist()]


def _middle_and_end(distribution: Distribution | None) -> str:
    if distribution is None:
        return ""
    percentiles = distribution.percentiles
    return f"median {number(percentiles[50])}, p90 {number(percentiles[90])}, greatest {number(distribution.most)}"


def _middle_half(distribution: Distribution | None) -> str:
    if distribution is None:
        return ""
    low, high = (number(distribution.percentiles[part]) for part in (25, 75))
    return f"{low} to {high}"
