"""The figures of a mean training step, of a real run or of a simulated one: both emit the same events."""

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from tailrace.events import Event
from tailrace.planning.foretold import StepFigures
from tailrace.registers.events import EventKind
from tailrace.registers.phases import Phase
from tailrace.report.breakdown import WorkerTime, breakdown_of
from tailrace.report.run_data import RunData, step_of
from tailrace.report.workers import has_engine, kind_of, worker_of
from tailrace.statistics.spans import covered_s


def figures_of(run: RunData, steps: Sequence[Event] | None = None) -> StepFigures | None:
    """Return the figures of some steps, by default of all after the first one, in which every process starts.

    None where no step has ended, or the run has not told where its time went (`observe.breakdown`).
    """
    counted = _whole(run, run.steps[1:] or run.steps if steps is None else steps)
    numbers = {step_of(step) for step in counted}
    responses = [event for event in run.samples if event.step in numbers and event.tokens and event.end > event.start]
    workers = breakdown_of(run.of(EventKind.BREAKDOWN), counted)
    engines = [one for one in workers if has_engine(one.worker) or one.worker == "engine"]
    trainer = [one for one in workers if kind_of(one.worker) == "trainer"]
    others = [one for one in workers if one not in trainer and _told([one], "update") > 0]
    elapsed = _seconds(counted)
    if not (responses and trainer and _told(engines, "generation") > 0 and elapsed > 0):
        return None
    return StepFigures(
        steps=len(counted),
        step_s=elapsed / len(counted),
        engines=sum(engine.seconds for engine in engines) / elapsed,
        batch=_seconds(responses) / _told(engines, "generation"),
        arrival_s=_arrival_s(run, counted),
        staleness=statistics.fmean(step.metrics.get("staleness_mean", 0.0) for step in counted),
        critic_s=_told(others, "update") / len(counted),
        **_of_workers(engines, trainer, elapsed / len(counted)),
        **_of_tasks([event for event in run.spans if event.step in numbers], len(counted)),
        **_of_responses(responses, len(counted)),
    )


def _whole(run: RunData, steps: Sequence[Event]) -> list[Event]:
    """Steps that end when every model has been trained: the event of a step ends with the policy."""
    others = {
        step_of(event): event.end
        for event in run.of(EventKind.OPTIMIZER)
        if event.step is not None and event.actor != "trainer"
    }
    return [replace(step, end=max(step.end, others.get(step_of(step), step.end))) for step in steps]


def _of_workers(engines: Sequence[WorkerTime], trainer: Sequence[WorkerTime], step_s: float) -> dict[str, float]:
    """The seconds of a step that a mean worker spent in its phases."""

    def spent(of: Sequence[WorkerTime], *phases: Phase) -> float:
        return step_s * _told(of, *phases) / sum(one.seconds for one in of)

    return {
        "generation_s": spent(engines, "generation"),
        "install_s": spent(engines, "weight_transfer"),
        "training_s": spent(trainer, "update"),
        "weights_s": spent(trainer, "weight_transfer", "weights"),
        "waiting_s": spent(trainer, "data", "tools"),
    }


def _of_tasks(spans: Sequence[Event], steps: int) -> dict[str, float]:
    """The seconds of a step in which a task was at work."""
    graded = [event for event in spans if event.task == EventKind.REWARD]
    scored = [event for event in spans if event.task == EventKind.REFERENCE]
    updates = [event for event in spans if event.task == EventKind.OPTIMIZER and event.actor == "trainer"]
    return {
        "reward_s": _covered(graded) / steps,
        "reference_s": _covered(scored) / steps,
        "optimizer_s": _seconds(updates) / steps,
        "grading_s": _seconds(graded) / max(1, *_samples_by_actor(graded).values()),
    }


def _samples_by_actor(events: Sequence[Event]) -> Counter[str]:
    samples: Counter[str] = Counter()
    for event in events:
        samples[event.actor] += event.samples or 1
    return samples


def _of_responses(responses: Sequence[Event], steps: int) -> dict[str, float]:
    tokens = [event.tokens or 0 for event in responses]
    contexts = [_prompt(event) + own / 2 for event, own in zip(responses, tokens, strict=True)]
    return {
        "samples": len(responses) / steps,
        "prompt_tokens": statistics.fmean(map(_prompt, responses)),
        "response_tokens": statistics.fmean(tokens),
        "longest_tokens": _longest(responses),
        "trained_tokens": (sum(tokens) + sum(_prompts(responses))) / steps,
        "context": sum(own * context for own, context in zip(tokens, contexts, strict=True)) / sum(tokens),
        "token_s": _seconds(responses) / sum(tokens),
    }


def _arrival_s(run: RunData, steps: Sequence[Event]) -> float:
    """Seconds from an update until engines had its weights, of those that came during some steps; 0 where none did."""
    updates = (event for event in run.of(EventKind.OPTIMIZER) if event.actor == "trainer" and event.step is not None)
    updated = {step_of(event) + 1: event.end for event in updates}
    arrived = [
        event.end - updated[event.version]
        for event in run.of(EventKind.UPDATE_WEIGHTS)
        if event.version in updated and steps[0].start < event.end <= steps[-1].end
    ]
    return max(0.0, statistics.fmean(arrived)) if arrived else 0.0


def peaks_of(run: RunData) -> dict[str, float]:
    """Return the most bytes that a worker of each kind had at once."""
    peaks: dict[str, float] = defaultdict(float)
    for event in run.of(EventKind.MEMORY):
        kind = kind_of(worker_of(event))
        peaks[kind] = max(peaks[kind], event.metrics.get("peak", 0.0))
    return dict(peaks)


def _told(workers: Iterable[WorkerTime], *phases: Phase) -> float:
    return sum(worker.told.get(phase, 0.0) for worker in workers for phase in phases)


def _prompt(event: Event) -> int:
    return int(event.info.get("prompt_tokens", 0))


def _prompts(responses: Iterable[Event]) -> Iterable[int]:
    """The tokens of the prompt of each group."""
    return {event.info.get("group"): _prompt(event) for event in responses}.values()


def _longest(responses: Iterable[Event]) -> float:
    """Tokens of a step's longest response, in the mean."""
    longest: dict[int, int] = defaultdict(int)
    for event in responses:
        longest[step_of(event)] = max(longest[step_of(event)], event.tokens or 0)
    return statistics.fmean(longest.values())


def _seconds(events: Iterable[Event]) -> float:
    return sum(event.end - event.start for event in events)


def _covered(events: Iterable[Event]) -> float:
    return covered_s((event.start, event.end) for event in events)
