"""How the figures of traces move over their steps (PolyTrace, figures 6, 7, 8 a, 11, 14 and 18)."""

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

from tailrace.registers.events import GREEN, RED
from tailrace.report.charts import Figure, axis, thinned
from tailrace.report.text import interval, number, percent, signed_percent
from tailrace.report.workload.base import (
    TALL,
    TOKENS,
    Workload,
    caption,
    colour_bar,
    faint,
    layout,
    line,
    log_axis,
    mean_of,
    share_axis,
    step_axis,
    titled,
    told,
    values_of,
)
from tailrace.workloads.characterization.description import Description
from tailrace.workloads.characterization.distribution import Distribution
from tailrace.workloads.characterization.steps import StepFigures
from tailrace.workloads.characterization.trend import LEAST_STEPS, TrendFigures

Value = Callable[[StepFigures], float | None]


def step_figures(shown: Sequence[Workload]) -> list[Figure | None]:
    """Return the charts over steps. Those of traces with one step are left out."""
    return [
        _lengths_figure(shown, "prompts", "Prompt lengths", lambda s: s.prompt_tokens, lambda d: d.prompt_trend),
        _lengths_figure(
            shown, "responses", "Response lengths", lambda s: s.response_tokens, lambda d: d.response_trend
        ),
        *(distances_figure(shown, workload, kind) for workload in shown for kind in ("responses", "prompts")),
        turns_figure(shown),
        *(rewards_figure(shown, workload) for workload in shown),
        kept_figure(shown),
        staleness_figure(shown),
    ]


def value_figure(
    shown: Sequence[Workload],
    value: Value,
    *,
    id: str,
    title: str,
    words: str,
    y: dict[str, Any],
    hover: str,
    height: int = 300,
) -> Figure | None:
    """Draw one value of each step; None where no trace has it in two steps."""
    found = [(workload, *series(workload, value)) for workload in shown]
    data = [
        line(workload, steps, values, f"step %{{x}}: {hover}") for workload, steps, values in found if len(steps) > 1
    ]
    if not data:
        return None
    return Figure(
        id=f"workload-{id}",
        title=title,
        caption=words,
        data=data,
        layout=layout(shown, step_axis(shown), y),
        height=height,
    )


def series(
    workload: Workload, value: Value, *, join: Callable[[Sequence[float]], float] = fmean
) -> tuple[list[float], list[float]]:
    """Return the steps of a trace that have a value, from 1, and their values; of many steps, several joined to one."""
    found = [(step.step + 1, value(step)) for step in workload.description.steps]
    known = [(step, figure) for step, figure in found if figure is not None]
    return thinned([step for step, _ in known]), thinned([figure for _, figure in known], join)


def turns_figure(shown: Sequence[Workload]) -> Figure | None:
    """Draw the mean number of turns of each step; None where no trace has turns."""
    return value_figure(
        shown,
        lambda step: mean_of(step.turns),
        id="turns-by-step",
        title="Turns over steps",
        words=caption("Mean turns of a sample.", told(shown, _turns_moved)),
        y=axis("Turns", rangemode="tozero"),
        hover="%{y:.2f} turns",
    )


def kept_figure(shown: Sequence[Workload]) -> Figure | None:
    """Draw the share of samples that the filter has kept in each step; None where no trace has a filter."""
    return value_figure(
        shown,
        lambda step: step.kept_share,
        id="kept",
        title="Kept by the filter",
        words=caption(told(shown, _kept, about="Of the samples"), "The others were generated and not trained on."),
        y=share_axis("Samples"),
        hover="%{y:.1%}",
    )


def staleness_figure(shown: Sequence[Workload]) -> Figure | None:
    """Draw the mean staleness of each step; None where no sample was stale, or no trace knows versions."""
    if not any(known.most for workload in shown if (known := workload.description.staleness) is not None):
        return None
    return value_figure(
        shown,
        lambda step: mean_of(step.staleness),
        id="staleness",
        title="Staleness over steps",
        words=caption("Versions between the weights that made a sample and those trained.", told(shown, _stale)),
        y=axis("Versions, mean", rangemode="tozero"),
        hover="%{y:.2f} versions",
    )


def rewards_figure(shown: Sequence[Workload], workload: Workload) -> Figure | None:
    """Draw the mean length of the correct and of the wrong responses of each step; None where one kind is missing."""
    kinds: tuple[tuple[str, str, Value], ...] = (
        ("correct", GREEN, lambda step: mean_of(step.correct)),
        ("wrong", RED, lambda step: mean_of(step.wrong)),
    )
    drawn = [
        line(Workload(name, colour, workload.description), *series(workload, value), "step %{x}: %{y:,.0f} tokens")
        for name, colour, value in kinds
    ]
    if min(len(each["x"]) for each in drawn) < 2:
        return None
    return Figure(
        id=f"workload-rewards-by-step-{shown.index(workload)}",
        title=titled("Correct and wrong responses over steps", shown, workload),
        caption=caption("Mean length of the responses of each step.", told([workload], _longer_when_correct)),
        data=drawn,
        layout=layout([], step_axis([workload]), axis(TOKENS, rangemode="tozero")) | {"showlegend": True},
    )


def distances_figure(shown: Sequence[Workload], workload: Workload, kind: str) -> Figure | None:
    """Draw how far the distributions of each two steps of a trace are apart; None for one step alone."""
    found = workload.description.distances
    if found is None:
        return None
    if kind == "prompts":
        cells, by_chance = found.prompt_tokens, found.prompts_by_chance
    else:
        cells, by_chance = found.response_tokens, found.responses_by_chance
    names = [f"{step + 1:,}" for step in found.steps]
    scale = {"type": "heatmap", "colorscale": "Viridis", "zmin": 0, "zmax": max(0.25, *map(max, cells))}
    hover = "steps %{x} and %{y}: %{z:.2f}<extra></extra>"
    category = {"type": "category", "nticks": 12, "showgrid": False}
    return Figure(
        id=f"workload-distances-{kind}-{shown.index(workload)}",
        title=titled(f"How far the {kind} of steps differ", shown, workload),
        caption=f"{_apart(cells)} {_chance(by_chance)}",
        data=[scale | {"x": names, "y": names, "z": cells, "colorbar": colour_bar("distance"), "hovertemplate": hover}],
        layout=layout([], axis("Step", **category), axis("Step", **category)),
        height=TALL,
    )


def moved(trend: TrendFigures | None) -> str:
    """Say how an amount has drifted, and where its level has changed."""
    if trend is None:
        return f"fewer than {LEAST_STEPS} steps, too few for a drift"
    size = f"{signed_percent(trend.drift)} a step (95 % interval {interval(trend.low, trend.high)})"
    drift = f"drift of {size}" if trend.is_clear else f"no clear drift: {size}"
    change = trend.change
    if not change.is_clear:
        return drift
    levels = f"from {number(change.before)} to {number(change.after)}"
    return f"{drift}; the level changes at step {change.step + 1:,} {levels} (p = {change.p_value:.2g})"


def _lengths_figure(
    shown: Sequence[Workload],
    id: str,
    title: str,
    of: Callable[[StepFigures], Distribution],
    trend: Callable[[Description], TrendFigures | None],
) -> Figure | None:
    several = [workload for workload in shown if len(workload.description.steps) > 1]
    if not several:
        return None
    lines = [each for workload in several for each in _band(workload, of)]
    return Figure(
        id=f"workload-{id}-by-step",
        title=f"{title} over steps",
        caption=caption(
            "Line: median; band: 5th to 95th percentile; dashed: mean; dotted: longest.",
            told(several, lambda description: moved(trend(description))),
        ),
        data=lines,
        layout=layout(shown, step_axis(shown), log_axis(TOKENS, values_of(lines, "y"))),
        wide=True,
        height=340,
    )


def _band(workload: Workload, of: Callable[[StepFigures], Distribution]) -> list[dict[str, Any]]:
    def drawn(
        label: str, value: Value, join: Callable[[Sequence[float]], float] = fmean, **style: Any
    ) -> dict[str, Any]:
        steps, values = series(workload, value, join=join)
        return line(workload, steps, values, "step %{x}: %{y:,.0f} tokens", label=label, **style)

    filled = {"fill": "tonexty", "fillcolor": faint(workload.colour)}
    return [
        drawn("p5", lambda step: of(step).percentiles[5], width=0.6),
        drawn("p95", lambda step: of(step).percentiles[95], width=0.6) | filled,
        drawn("mean", lambda step: of(step).mean, width=1.4, dash="dash"),
        drawn("longest", lambda step: of(step).most, join=max, width=1.2, dash="dot"),
        drawn("", lambda step: of(step).percentiles[50], width=2.4),
    ]


def _turns_moved(description: Description) -> str:
    return "" if description.turns is None else moved(description.turns_trend)


def _kept(description: Description) -> str:
    return "" if description.kept_share is None else percent(description.kept_share)


def _stale(description: Description) -> str:
    staleness = description.staleness
    return "" if staleness is None else f"mean {number(staleness.mean)}, greatest {number(staleness.most)}"


def _longer_when_correct(description: Description) -> str:
    both = [step for step in description.steps if step.correct is not None and step.wrong is not None]
    longer = [step for step in both if (mean_of(step.correct) or 0) > (mean_of(step.wrong) or 0)]
    return f"correct responses are the longer ones in {len(longer)} of {len(both)} steps" if both else ""


def _chance(distance: float) -> str:
    if distance >= 1:
        return "The steps have so few that chance alone gives any distance."
    return f"Chance alone exceeds {distance:.2f} in one of 20 cases."


def _apart(cells: Sequence[Sequence[float]]) -> str:
    between = sorted(cells[one][other] for one in range(len(cells)) for other in range(one))
    return f"The median distance of two steps is {between[len(between) // 2]:.2f}, the greatest {between[-1]:.2f}."
