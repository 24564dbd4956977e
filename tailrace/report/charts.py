"""What every page with charts is made of: plotly figures in plain dictionaries, and sections of them. The page sets the
colours of text and grid."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

_POINTS = 600
"""Maximum number of points of a line; beyond that a point stands for several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A chart with its title and caption."""

    id: str
    title: str
    caption: str
    data: list[dict[str, Any]]
    layout: dict[str, Any]
    wide: bool = False
    """Whether it takes the whole width of the page."""
    height: int = 300
    """Height in pixels."""


@dataclass(frozen=True, slots=True)
class Section:
    """Charts that belong together."""

    title: str
    figures: list[Figure]
    table: Sequence[Mapping[str, str]] = ()
    """Rows of a table below the charts, all with the same columns; the keys of the first row are their names."""
    note: str = ""
    """A line above the charts."""


def drawn(figures: Iterable[Figure | None]) -> list[Figure]:
    """Return the charts that have something to draw."""
    return [figure for figure in figures if figure is not None]


def sections(figures: Mapping[str, Iterable[Figure | None]]) -> list[Section]:
    """Return the sections of some titles. Those without a chart are left out."""
    made = {title: drawn(group) for title, group in figures.items()}
    return [Section(title, group) for title, group in made.items() if group]


def axis(title: str, **properties: Any) -> dict[str, Any]:
    """Return an axis of a layout, with further properties of plotly."""
    return {"title": {"text": title}, **properties}


def right_axis(title: str, **properties: Any) -> dict[str, Any]:
    """Return a second vertical axis, on the right."""
    return axis(title, overlaying="y", side="right", showgrid=False, **properties)


def thinned(values: Sequence[float], join: Callable[[Sequence[float]], float] = fmean) -> list[float]:
    """Return `values`; where there are more than a line has points, as many equal parts, each joined to one value."""
    if len(values) <= _POINTS:
        return list(values)
    return [join(part.tolist()) for part in np.array_split(np.asarray(values, np.float64), _POINTS)]
