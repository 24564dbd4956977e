"""How long the samples of each training step were generated, and how long the step was trained on."""

from collections import defaultdict
from typing import NamedTuple

from tailrace.events import Event
from tailrace.registers.events import TRAINED
from tailrace.report.run_data import RunData, step_of
from tailrace.statistics.spans import covered_s


class StepTime(NamedTuple):
    """The times of a finished step."""

    step: Event
    generation_s: float
    """In which samples of it were generated, and none of an earlier step any more: steps that run ahead overlap."""
    training_s: float
    """In which a model was trained on it. Several may be at the same time."""


def step_times(run: RunData) -> list[StepTime]:
    """Return the times of the finished steps, by number. Steps without a sample are left out."""
    generated: dict[int, list[tuple[float, float]]] = defaultdict(list)
    trained: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for event in run.samples:
        generated[step_of(event)].append((event.start, event.end))
    for event in run.of(*TRAINED):
        if event.step is not None:
            trained[event.step].append((event.start, event.end))
    times, until = [], float("-inf")
    for step in run.steps:
        if spans := generated.get(number := step_of(step)):
            times.append(StepTime(step, covered_s(spans, until), covered_s(trained[number])))
            until = max(until, *(end for _, end in spans))
    return times
