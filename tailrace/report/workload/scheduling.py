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

_TOLD = LONGEST[0]
"""The percentage of longest samples that charts over steps and captions tell about."""


def scheduling_figures(shown: Sequence[Workload]) -> list[Figure | None]:
    """Return the charts of what lengths known before can gain."""
    return [recall_figure(shown), tail_figure(shown), recall_by_step_figure(shown)]


def recall_figure(shown: Sequence[Workload]) -> Figure | None:
    """Draw how many of the longest samples the other samples of their prompts foretell; None for groups of one."""
    told_of = [workload for workload in shown if workload.description.longest_recall]
    if not told_of:
        return None
    names = [f"longest {part} %" for part in LONGEST]
    chance = _bars("chance", GREY, names, [part / 100 for part in LONGEST])
    found = [
        _bars(each.name, each.colour, names, [each.description.longest_recall[part] for part in LONGEST])
        for each in told_of
    ]
    return Figure(
        id="workload-recall",
        title="Longest samples that are found beforehand",
        caption=caption(
            "By the mean length of the other samples of their prompt.",
            told(told_of, _recall, about=f"Of the longest {_TOLD} %"),
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
        lambda step: step.longest_recall.get(_TOLD),
        id="recall-by-step",
        title=f"Longest {_TOLD} % that are found, over steps",
        words=f"A prompt's other samples find them; chance alone finds {_TOLD} %.",
        y=share_axis("Found"),
        hover="%{y:.1%}",
    )


def _bars(name: str, colour: str, x: Sequence[str], y: Sequence[float]) -> dict[str, Any]:
    hover = f"%{{x}}: %{{y:.1%}}<extra>{name}</extra>"
    return {"type": "bar", "name": name, "x": x, "y": y, "marker": {"color": colour}, "hovertemplate": hover}


def _recall(description: Description) -> str:
    found = description.longest_recall[_TOLD]
    return f"{percent(found)}, {100 * found / _TOLD:.1f} times what chance finds"


def _tail(description: Description) -> str:
    return "" if description.tail_share is None else percent(description.tail_share)
