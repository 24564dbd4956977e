"""What a scheduler that knows the lengths can gain (PolyTrace, section 3.1; StreamRL, sections 5.1 to 5.3)."""

from collections.abc import Sequence
from typing import Any

from tailrace.registers.events import GREY
from tailrace.report.charts import Figure, axis
from tailrace.report.text import percent
from tailrace.report.workload.base import Workload, caption, layout, share_axis, told
from tailrace.report.workload.steps import value_figure
from tailrace.workloads.characterization.description import Description
from tailrace.workloads.characterization.prompts import LONGEST

_SHOWN = LONGEST[0]
"""The percentage of longest samples in charts over steps, and in captions."""


def scheduling_figures(shown: Sequence[Workload]) -> list[Figure | None]:
    """Return the charts of what lengths known before can gain."""
    return [recall_figure(shown), tail_figure(shown), recall_by_step_figure(shown)]


def recall_figure(shown: Sequence[Workload]) -> Figure | None:
    """Draw how many of the longest samples the other samples of their prompts find; None where no trace has as many."""
    known = [workload for workload in shown if _SHOWN in workload.description.longest_recall]
    if not known:
        return None
    names = [f"longest {part} %" for part in LONGEST]
    chance = _bars("chance", GREY, names, [part / 100 for part in LONGEST])
    found = [
        _bars(each.name, each.colour, names, [each.description.longest_recall.get(part) for part in LONGEST])
        for each in known
    ]
    return Figure(
        id="workload-recall",
        title="Longest samples that are found beforehand",
        caption=caption(
            "By the mean length of the other samples of their prompt.",
            told(known, _recall, about=f"Of the longest {_SHOWN} %"),
        ),
        data=[*found, chance],
        layout=layout([], axis("Samples", type="category"), share_axis("Found")) | {"showlegend": True, "bargap": 0.25},
    )


def tail_figure(shown: Sequence[Workload]) -> Figure | None:
    """Draw the share of each step in which few samples run; None where no trace has two steps that drain."""
    return value_figure(
        shown,
        lambda step: step.tail_share,
        id="tail-by-step",
        title="Generation with fewer than a tenth running",
        words=caption(
            told(shown, _tail, about="Mean of the steps"), "Engines idle then, unless other work fills them."
        ),
        y=share_axis("Of the step"),
        hover="%{y:.1%} of the step",
    )


def recall_by_step_figure(shown: Sequence[Workload]) -> Figure | None:
    """Draw the recall of the longest fifth in each step; None where no trace has it in two steps."""
    return value_figure(
        shown,
        lambda step: step.longest_recall.get(_SHOWN),
        id="recall-by-step",
        title=f"Longest {_SHOWN} % that are found, over steps",
        words=f"A prompt's other samples find them; chance alone finds {_SHOWN} %.",
        y=share_axis("Found"),
        hover="%{y:.1%}",
    )


def _bars(name: str, colour: str, x: Sequence[str], y: Sequence[float | None]) -> dict[str, Any]:
    hover = f"%{{x}}: %{{y:.1%}}<extra>{name}</extra>"
    return {"type": "bar", "name": name, "x": x, "y": y, "marker": {"color": colour}, "hovertemplate": hover}


def _recall(description: Description) -> str:
    found = description.longest_recall[_SHOWN]
    return f"{percent(found)}, {100 * found / _SHOWN:.1f} times what chance finds"


def _tail(description: Description) -> str:
    return "" if description.tail_share is None else percent(description.tail_share)
