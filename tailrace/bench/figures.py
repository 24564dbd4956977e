"""What the events of a run say about its time. Pure: events in, figures out.

The first steps warm up and do not count; the measured time is from the end of the last of them to the end of the run's
last step. Stages overlap: each has the seconds in which it was at work (PolyTrace, section 4.2).
"""

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from tailrace.config.base import GIB
from tailrace.errors import BenchError, UserError
from tailrace.events import Event
from tailrace.registers.events import EventKind
from tailrace.registers.phases import PHASES
from tailrace.report.breakdown import WorkerTime, breakdown_of, told_by_block
from tailrace.report.workers import STATE_TITLES, worker_of, worker_order

STAGES: Mapping[str, frozenset[str]] = {
    "generation": frozenset({EventKind.ROLLOUT}),
    "reward": frozenset({EventKind.REWARD}),
    "reference": frozenset({EventKind.REFERENCE}),
    "advantage": frozenset({EventKind.ADVANTAGE}),
    "update": frozenset({EventKind.ACTOR, EventKind.OPTIMIZER}),
    "weights": frozenset(
        {EventKind.UPDATE_WEIGHTS, EventKind.WEIGHTS_PUBLISH, EventKind.WEIGHTS_TRANSFER, EventKind.WEIGHTS_WAIT}
    ),
}
"""The kinds of events of each stage."""
_DONE = 0.9
"""The part of a step's samples after which its tail begins."""


class StepFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One training step."""

    step: int
    seconds: float
    """From the end of the step before to its own."""
    stages: dict[str, float]
    """Seconds within that time in which each stage was at work."""
    samples: int
    response_tokens: int
    tail_share: float
    """The part of the generation of its samples that was left when 90 % of them were done, rounded down to whole
    samples: 7 of 8."""


class WorkerFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Where the measured time of one worker went."""

    worker: str
    shares: dict[str, float]
    """The part of its time in each state: busy, data, weights, idle (`tailrace.activity`); empty for a mere process."""
    phases: dict[str, float]
    """The part of its time in each phase (`tailrace.registers.phases`), where its events tell."""
    parts: dict[str, dict[str, float]]
    """The parts of these phases, such as prefill and decode of generation, also of its whole time."""
    peak_memory_gib: float | None
    """The most memory that it had, in the whole run."""


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """All steps after the warm-up together."""

    steps: list[StepFigures]
    seconds: float
    """End-to-end seconds of these steps."""
    step_s: float
    """Their mean."""
    stages: dict[str, float]
    """Mean seconds a step in which each stage was at work."""
    samples_per_s: float
    tokens_per_s: float
    """Tokens of the steps' responses, without those of tools."""
    tokens_per_s_device: float
    training_tokens_per_s: float | None
    """Response tokens for each second in which the update was at work; None where no event tells of updates."""
    tail_share: float
    """Mean over the steps."""
    workers: list[WorkerFigures]


def check_steps(steps: int, warm_up: int) -> None:
    """Raise a UserError where a run of `steps` has none left after the warm-up."""
    if steps <= warm_up:
        raise UserError(
            f"the run has {steps} steps, and {warm_up} of them warm up; raise trainer.steps, or lower --warm-up"
        )


def figures_of(events: Sequence[Event], *, warm_up: int, devices: int) -> Figures:
    """Work out the figures of a run.

    Args:
        events: of one attempt.
        warm_up: steps that do not count.
        devices: that generate or train.

    Raises:
        UserError: no step is left after the warm-up.
        BenchError: a step ends before it can begin.
    """
    ends = {event.step: event.end for event in events if event.task == EventKind.STEP and event.step is not None}
    check_steps(len(ends), warm_up)
    first = min(event.start for event in events if event.task in STAGES["generation"] | {EventKind.STEP})
    bounds = [first, *(ends[step] for step in sorted(ends))]
    windows = list(zip(sorted(ends), bounds, bounds[1:], strict=False))[warm_up:]
    for step, start, end in windows:
        if end <= start:
            raise BenchError(f"step {step} ends at {end:g} s; expected a time after {start:g} s, when it can begin")
    of_stages = {stage: [event for event in events if event.task in kinds] for stage, kinds in STAGES.items()}
    of_steps: dict[int | None, list[Event]] = {}
    for event in events:
        if event.task == EventKind.SAMPLE:
            of_steps.setdefault(event.step, []).append(event)
    steps = [_step(of_stages, of_steps.get(step, []), step, start, end) for step, start, end in windows]
    return _whole(steps, _workers(events, _Window(windows[0][1], windows[-1][2])), devices)


def _step(
    of_stages: Mapping[str, Sequence[Event]], of_step: Sequence[Event], step: int, start: float, end: float
) -> StepFigures:
    """The figures of one step. `of_stages`: all events of each stage. `of_step`: the step's samples."""
    samples = list({(event.info.get("group"), event.info.get("sample")): event for event in of_step}.values())
    return StepFigures(
        step=step,
        seconds=end - start,
        stages={stage: _busy(spans, start, end) for stage, spans in of_stages.items()},
        samples=len(samples),
        response_tokens=sum(event.tokens or 0 for event in samples),
        tail_share=_tail(samples),
    )


def _busy(events: Iterable[Event], start: float, end: float) -> float:
    """Seconds between `start` and `end` in which at least one of the events lasted."""
    spans = sorted((max(start, event.start), min(end, event.end)) for event in events)
    seconds, reached = 0.0, start
    for begin, stop in spans:
        seconds += max(0.0, stop - max(begin, reached))
        reached = max(reached, stop)
    return seconds


def _tail(samples: Sequence[Event]) -> float:
    if not samples:
        return 0.0
    ends = sorted(event.end for event in samples)
    begin, most = min(event.start for event in samples), ends[max(0, int(_DONE * len(ends)) - 1)]
    return (ends[-1] - most) / (ends[-1] - begin) if ends[-1] > begin else 0.0


@dataclass(frozen=True, slots=True)
class _Window:
    """The measured time."""

    start: float
    end: float


def _workers(events: Sequence[Event], window: _Window) -> Iterator[WorkerFigures]:
    times = {time.worker: time for time in breakdown_of(events, [window])}
    peaks: dict[str, float] = {}
    for event in events:
        if event.task == EventKind.MEMORY:
            peaks[worker_of(event)] = max(peaks.get(worker_of(event), 0.0), event.metrics.get("peak", 0.0) / GIB)
    states = _states(events, window)
    for worker in sorted({*states, *peaks}, key=worker_order):  # a colocated run has one process for its workers
        time = times.get(worker, WorkerTime(worker, {}))
        yield WorkerFigures(
            worker=worker,
            shares=states.get(worker, {}),
            phases={phase: share for phase in PHASES if (share := time.share(phase))},
            parts={str(phase): parts for phase, parts in time.parts.items()},
            peak_memory_gib=peaks.get(worker),
        )


def _states(events: Iterable[Event], window: _Window) -> dict[str, dict[str, float]]:
    """The share of each state, by worker."""
    (told,) = told_by_block(events, EventKind.ACTIVITY, [[window]])
    seconds = {worker: {state: metrics.get(state, 0.0) for state in STATE_TITLES} for worker, metrics in told.items()}
    return {
        worker: {state: spent / sum(states.values()) for state, spent in states.items()}
        for worker, states in seconds.items()
        if any(states.values())
    }


def _whole(steps: list[StepFigures], workers: Iterable[WorkerFigures], devices: int) -> Figures:
    seconds = sum(step.seconds for step in steps)
    tokens = sum(step.response_tokens for step in steps)
    updating = sum(step.stages["update"] for step in steps)
    return Figures(
        steps=steps,
        seconds=seconds,
        step_s=seconds / len(steps),
        stages={stage: statistics.fmean(step.stages[stage] for step in steps) for stage in STAGES},
        samples_per_s=sum(step.samples for step in steps) / seconds,
        tokens_per_s=tokens / seconds,
        tokens_per_s_device=tokens / seconds / devices,
        training_tokens_per_s=tokens / updating if updating else None,
        tail_share=statistics.fmean(step.tail_share for step in steps),
        workers=list(workers),
    )
