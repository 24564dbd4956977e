"""The traces of a page, and what their charts share: colours, captions, axes and lines."""

import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tailrace.registers.events import BLUE, GREEN, GREY, ORANGE, PURPLE, RED
from tailrace.report.charts import axis
from tailrace.workloads.characterization.description import Description
from tailrace.workloads.characterization.distribution import Distribution

_COLOURS = (BLUE, ORANGE, GREEN, PURPLE, RED, GREY)
TOKENS = "Tokens"
TALL = 380
"""Pixels of the height of a heat map, and of the chart beside it."""
MARKER = 9
"""Pixels of a point."""


@dataclass(frozen=True, slots=True)
class Workload:
    """A trace of a page."""

    name: str
    colour: str
    description: Description


def workloads(descriptions: Mapping[str, Description]) -> list[Workload]:
    """Return the traces of a page, by their names, each with its colour."""
    return [
        Workload(name, _COLOURS[index % len(_COLOURS)], description)
        for index, (name, description) in enumerate(descriptions.items())
    ]


def told(shown: Sequence[Workload], statement: Callable[[Description], str], *, about: str = "") -> str:
    """Return a sentence with a statement about each trace, by name where there are several; empty where it is empty.

    Args:
        about: what the statements are about, for the beginning of the sentence.
    """
    made = [(workload.name, statement(workload.description)) for workload in shown]
    mark = "" if about else ":"
    said = [f"{name}{mark} {words}" if len(shown) > 1 else words for name, words in made if words]
    if not said:
        return ""
    if about:
        return f"{about}: {'; '.join(said)}."
    return f"{'; '.join(said)}." if len(shown) > 1 else f"{said[0][0].upper()}{said[0][1:]}."


def caption(*sentences: str) -> str:
    """Join the sentences that are not empty."""
    return " ".join(sentence for sentence in sentences if sentence)


def titled(title: str, shown: Sequence[Workload], workload: Workload) -> str:
    """Return the title of a chart of one trace: with its name where there are several."""
    return f"{title}: {workload.name}" if len(shown) > 1 else title


def layout(shown: Sequence[Workload], x: dict[str, Any], y: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return a layout with a legend where there are several traces."""
    return {"xaxis": x, "yaxis": y, "showlegend": len(shown) > 1, **more}


def log_axis(title: str, values: Iterable[float | None], **properties: Any) -> dict[str, Any]:
    """Return a logarithmic axis for some values, with as many marks as there is room for."""
    known = [value for value in values if value]
    span = max(known) / min(known) if known else 1
    marks: dict[str, Any] = {"nticks": 7} if span < 4 else {"dtick": "D2" if span < 500 else 1}
    return axis(title, **({"type": "log", "tickformat": ",.6~g"} | marks | properties))


def values_of(data: Iterable[Mapping[str, Any]], coordinate: str) -> Iterator[float | None]:
    """Yield the x or the y of everything that a chart draws, and the ends of bars around them."""
    for drawn in data:
        yield from drawn[coordinate]
        if (bars := drawn.get(f"error_{coordinate}")) is not None:
            yield from map(operator.add, drawn[coordinate], bars["array"])
            yield from map(operator.sub, drawn[coordinate], bars["arrayminus"])


def share_axis(title: str) -> dict[str, Any]:
    """Return an axis for shares."""
    return axis(title, tickformat=".2~%", rangemode="tozero")


def count_axis(title: str, most: int) -> dict[str, Any]:
    """Return an axis for whole numbers up to `most`, with at most a dozen marks."""
    sizes = (factor * 10**exponent for exponent in itertools.count() for factor in (1, 2, 5))
    return axis(title, tickformat=",d", dtick=next(size for size in sizes if 12 * size >= most))


def step_axis(shown: Sequence[Workload]) -> dict[str, Any]:
    """Return the axis of training steps, which people count from 1."""
    return count_axis("Step", max(workload.description.steps[-1].step for workload in shown) + 1)


def line(
    workload: Workload,
    x: Sequence[float],
    y: Sequence[float | None],
    hover: str,
    *,
    width: float = 2.0,
    dash: str = "solid",
    label: str = "",
    shape: str = "linear",
) -> dict[str, Any]:
    """Return a line of a trace. Lines with a label are not in the legend: its entry stands for all of a trace."""
    return {
        "type": "scatter",
        "name": workload.name,
        "legendgroup": workload.name,
        "showlegend": not label,
        "x": list(x),
        "y": list(y),
        "mode": "lines" if len(x) > 1 else "markers",
        "line": {"color": workload.colour, "width": width, "dash": dash, "shape": shape},
        "hovertemplate": f"{hover}<extra>{' '.join(part for part in (workload.name, label) if part)}</extra>",
    }


def spread(percentiles: Sequence[Mapping[int, float]], colour: str) -> dict[str, Any]:
    """Return error bars from the 5th to the 95th percentile, around points at the median."""
    return {
        "type": "data",
        "symmetric": False,
        "array": [each[95] - each[50] for each in percentiles],
        "arrayminus": [each[50] - each[5] for each in percentiles],
        "color": colour,
        "thickness": 1.2,
    }


def faint(colour: str) -> str:
    """Return a colour (#rrggbb) for an area."""
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.18)"


def mean_of(distribution: Distribution | None) -> float | None:
    """Return the mean of a distribution that a trace may not have."""
    return None if distribution is None else distribution.mean


def heat(z: Sequence[Sequence[float | None]], unit: str, hover: str, **places: Any) -> dict[str, Any]:
    """Return a heat map of positive values, with colours by their logarithm; None leaves a cell empty."""
    logs = [[None if value is None else math.log10(value) for value in row] for row in z]
    known = [value for row in z for value in row if value is not None]
    ticks = _round_numbers(min(known), max(known))
    return {
        "type": "heatmap",
        "z": logs,
        "customdata": z,
        "colorscale": "Viridis",
        "colorbar": {
            **colour_bar(unit),
            "tickvals": [math.log10(tick) for tick in ticks],
            "ticktext": [f"{tick:,}" for tick in ticks],
        },
        "hovertemplate": f"{hover}: %{{customdata:,}} {unit}<extra></extra>",
        "hoverongaps": False,
        **places,
    }


def colour_bar(title: str) -> dict[str, Any]:
    """Return the colour bar of a heat map."""
    return {"title": {"text": title, "side": "right", "font": {"size": 12.5}}, "thickness": 12, "outlinewidth": 0}


def _round_numbers(least: float, most: float) -> list[int]:
    """Return 1, 2 and 5 times the powers of ten from `least` to `most`; of many, the powers alone."""
    powers = [10**exponent for exponent in range(math.floor(math.log10(most)) + 1)]
    factors = (1, 2, 5) if most < 300 * least else (1,)
    ticks = [factor * power for power in powers for factor in factors if least <= factor * power <= most]
    return ticks or [round(least)]
