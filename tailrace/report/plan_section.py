"""What was foretold of a run beside what it took, stage by stage."""

from collections.abc import Iterator, Mapping
from typing import Any

from tailrace.config.base import GIB
from tailrace.planning.foretold import Foretold, StepFigures
from tailrace.planning.reality import verdict
from tailrace.registers.events import BLUE, GREY
from tailrace.report.charts import Figure, Section, axis
from tailrace.report.run_data import RunData
from tailrace.report.step_figures import figures_of, peaks_of
from tailrace.report.text import number

STAGES: Mapping[str, str] = {
    "step_s": "the step",
    "generation_s": "an engine generates",
    "install_s": "an engine takes weights in",
    "reward_s": "something is graded",
    "reference_s": "the reference scores",
    "critic_s": "the critic computes",
    "training_s": "the trainer computes",
    "weights_s": "the trainer hands weights on",
    "waiting_s": "the trainer waits for samples",
    "arrival_s": "new weights reach an engine after",
}
"""The parts of a step, by the names of `StepFigures`; they overlap."""
_WORK: Mapping[str, str] = {
    "samples": "responses of a step",
    "response_tokens": "tokens of a response",
    "longest_tokens": "tokens of a step's longest response",
    "prompt_tokens": "tokens of a prompt",
    "trained_tokens": "tokens of a step that are trained on",
    "engines": "engines",
    "batch": "responses of an engine at a time",
    "staleness": "staleness, versions",
}
_KINDS = {"rollout": "an engine's device", "trainer": "the trainer's device", "critic": "the critic's device"}


def plan_section(run: RunData, foretold: Foretold | None) -> list[Section]:
    """Return the section; none without a prediction, or where the run has not told where its time went."""
    if foretold is None or (measured := figures_of(run)) is None:
        return []
    note = f"{verdict(foretold, measured)} Foretold of {foretold.of}; step times rest on {foretold.rests_on}."
    rows = [*_rows(foretold, measured), *_memory_rows(foretold, peaks_of(run))]
    return [Section("Plan against reality", [_figure(foretold.figures, measured)], rows, note)]


def _figure(foretold: StepFigures, measured: StepFigures) -> Figure:
    stages = {name: title for name, title in STAGES.items() if getattr(foretold, name) or getattr(measured, name)}
    data: list[dict[str, Any]] = [
        {
            "type": "bar",
            "orientation": "h",
            "name": said,
            "x": [getattr(figures, name) for name in stages],
            "y": list(stages.values()),
            "marker": {"color": colour},
            "hovertemplate": f"%{{y}}: %{{x:.3~g}} s<extra>{said}</extra>",
        }
        for said, figures, colour in (("foretold", foretold, GREY), ("measured", measured, BLUE))
    ]
    layout = {
        "barmode": "group",
        "bargap": 0.3,
        "xaxis": axis("Seconds of a step", rangemode="tozero"),
        "yaxis": axis("", autorange="reversed", showgrid=False, type="category", automargin=True),
        "legend": {"traceorder": "normal"},
        "showlegend": True,
    }
    return Figure(
        id="plan-against-reality",
        title="A mean step, foretold and measured",
        caption="Parts of it that overlap. All steps but the first count. Engines: the mean of all.",
        data=data,
        layout=layout,
        wide=True,
        height=120 + 34 * len(stages),
    )


def _rows(foretold: Foretold, measured: StepFigures) -> Iterator[dict[str, str]]:
    plan = foretold.figures
    for name, title in STAGES.items():
        if getattr(plan, name) or getattr(measured, name):
            yield _row(f"{title}, s", getattr(plan, name), getattr(measured, name))
    for name, title in _WORK.items():
        yield _row(title, getattr(plan, name), getattr(measured, name))
    step = f"a decode step of {number(measured.batch)} responses, ms"
    yield _row(step, 1e3 * foretold.token_s(measured), 1e3 * measured.token_s)
    yield _row("a token that is trained on, µs", 1e6 * plan.trained_token_s, 1e6 * measured.trained_token_s)
    yield _row("the optimizer, s a step", plan.optimizer_s, measured.optimizer_s)
    yield _row("a grading, ms", 1e3 * plan.grading_s, 1e3 * measured.grading_s)


def _memory_rows(foretold: Foretold, peaks: Mapping[str, float]) -> Iterator[dict[str, str]]:
    for kind, peak in foretold.memory.items():
        title = f"memory of {_KINDS.get(kind, kind)}, GiB; foretold at the {peak.instant}"
        if kind in peaks:
            yield _row(title, peak.bytes / GIB, peaks[kind] / GIB)
        else:
            yield {**_row(title, peak.bytes / GIB, 0.0), "Measured": "–", "Difference": "–"}


def _row(title: str, foretold: float, measured: float) -> dict[str, str]:
    change = round(100 * (measured / foretold - 1), 1) if foretold > 0 else None
    return {
        "Of a mean step": title,
        "Foretold": number(foretold),
        "Measured": number(measured),
        "Difference": "–" if change is None else f"{change:+} %" if change else "0 %",
    }
