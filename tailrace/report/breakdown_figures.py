"""The charts of the workers' time by phase: over all steps, in parts, and step by step.

After PolyTrace, figures 19 and 21.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tailrace.registers.events import EventKind
from tailrace.registers.phases import PARTS, PHASES, Phase, PhaseEntry
from tailrace.report.breakdown import REST, WorkerTime, breakdown_by_block, breakdown_of
from tailrace.report.charts import Figure, axis
from tailrace.report.lanes import Span
from tailrace.report.run_data import RunData, shown_step
from tailrace.report.timeline import Window
from tailrace.report.workers import kind_of

_BARS = 120
"""Maximum number of bars of a chart; beyond that a bar is several steps."""
_FIFTHS = [0, 0.2, 0.4, 0.6, 0.8, 1]
_REST = PhaseEntry(title="other", meaning="not told", colour=PHASES["idle"].colour)


def breakdown_figures(run: RunData) -> list[Figure]:
    """Return the charts; none where the run has no events `breakdown`."""
    events, steps = list(run.of(EventKind.BREAKDOWN)), run.steps
    counted: Sequence[Span] = steps[1:] or steps or [Window("the run so far", 0.0, run.seconds)]
    workers = breakdown_of(events, counted)
    if not workers:
        return []
    size = -(-len(steps) // _BARS) or 1
    blocks = [steps[first : first + size] for first in range(0, len(steps), size)]
    by_kind = _shares_by_kind(breakdown_by_block(events, blocks))
    labels = [shown_step(block[0]) for block in blocks]
    of_steps = [_steps_figure(kind, labels, shares) for kind, shares in by_kind.items()]
    return [_phases_figure(workers), *_in_pairs([*_parts_figures(workers), *of_steps])]


def _in_pairs(figures: list[Figure]) -> list[Figure]:
    """Widen the last of an odd number of figures, which has no neighbour."""
    return [*figures[:-1], replace(figures[-1], wide=True)] if len(figures) % 2 else figures


def _phases_figure(workers: Sequence[WorkerTime]) -> Figure:
    traces = [
        _bars(entry, [(worker.worker, worker.share(phase), worker.told.get(phase, 0.0)) for worker in workers])
        for phase, entry in PHASES.items()
        if any(worker.share(phase) for worker in workers)
    ]
    return bar_figure(
        "workers",
        "Where the time goes",
        "Of each worker, in the steps after the first. Waiting is for rows of the queue, for tools or for new weights.",
        traces,
        wide=True,
    )


def _parts_figures(workers: Sequence[WorkerTime]) -> list[Figure]:
    """Return a chart for each phase whose parts some worker knows."""
    return [_parts_figure(phase, known) for phase in PARTS if (known := [w for w in workers if phase in w.parts])]


def _parts_figure(phase: Phase, workers: Sequence[WorkerTime]) -> Figure:
    traces = []
    for part, entry in {**PARTS[phase], REST: _REST}.items():
        shares = [(worker.worker, worker.parts[phase].get(part, 0.0), worker) for worker in workers]
        if any(share for _, share, _ in shares):
            bars = [(name, share / worker.share(phase), share * worker.seconds) for name, share, worker in shares]
            traces.append(_bars(entry, bars))
    title = f"Parts of {phase}" if phase == "generation" else f"Parts of the {phase}"
    return bar_figure(f"parts-{phase}", title, f"Of the time that was {phase} in the chart above.", traces)


def _bars(entry: PhaseEntry, bars: Sequence[tuple[str, float, float]]) -> dict[str, Any]:
    """Return the part of the bars that one phase takes: the worker, the share, and the seconds of each."""
    return {
        "type": "bar",
        "orientation": "h",
        "name": entry.title,
        "x": [share for _, share, _ in bars],
        "y": [name for name, _, _ in bars],
        "customdata": [seconds for _, _, seconds in bars],
        "marker": {"color": entry.colour},
        "hovertemplate": f"%{{y}}: {entry.title} %{{x:.1%}} (%{{customdata:.1f}} s)<extra></extra>",
    }


def bar_figure(id: str, title: str, caption: str, data: list[dict[str, Any]], *, wide: bool = False) -> Figure:
    """Draw a bar for each worker, divided into shares of its time. `data`: the bars of each share."""
    layout = {
        "barmode": "stack",
        "bargap": 0.35,
        "xaxis": axis("Time", tickformat=".0%", tickvals=_FIFTHS, range=[0, 1.001]),
        "legend": {"traceorder": "normal"},
        "margin": {"l": 56, "r": 24, "t": 8, "b": 44},
        "yaxis": axis("Worker", autorange="reversed", showgrid=False, type="category"),
        "showlegend": True,
    }
    height = 120 + 30 * len(data[0]["y"])
    return Figure(id=id, title=title, caption=caption, data=data, layout=layout, wide=wide, height=height)


def _shares_by_kind(blocks: Sequence[Sequence[WorkerTime]]) -> dict[str, list[dict[Phase, float]]]:
    """Return the mean shares of the workers of each kind, in each block; without any where no worker told of it."""
    kinds = dict.fromkeys(kind_of(worker.worker) for workers in blocks for worker in workers)
    return {
        kind: [_mean_shares([worker for worker in workers if kind_of(worker.worker) == kind]) for workers in blocks]
        for kind in kinds
    }


def _mean_shares(workers: Sequence[WorkerTime]) -> dict[Phase, float]:
    if not workers:
        return {}
    return {phase: statistics.fmean(worker.share(phase) for worker in workers) for phase in PHASES}


def _steps_figure(kind: str, steps: Sequence[int], shares: Sequence[Mapping[Phase, float]]) -> Figure:
    """Draw a bar for each block of steps, which is named by its first step."""
    told = {phase: [share.get(phase, 0.0) for share in shares] for phase in PHASES}
    data: list[dict[str, Any]] = [
        {
            "type": "bar",
            "name": entry.title,
            "x": list(steps),
            "y": told[phase],
            "marker": {"color": entry.colour, "line": {"width": 0}},
            "hovertemplate": f"step %{{x}}: {entry.title} %{{y:.1%}}<extra></extra>",
        }
        for phase, entry in PHASES.items()
        if any(told[phase])
    ]
    return Figure(
        id=f"time-of-{kind}",
        title=f"Each step: {kind}",
        caption="The time of a training step by phase. The mean, where there are several such workers.",
        data=data,
        layout={
            "barmode": "stack",
            "bargap": 0.08,
            "xaxis": axis("Training step"),
            "yaxis": axis("Time", tickformat=".0%", tickvals=_FIFTHS, range=[0, 1.001]),
            "legend": {"traceorder": "normal"},
            "showlegend": True,
        },
    )
