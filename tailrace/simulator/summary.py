"""The figures of a simulated run."""

import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from tailrace.events import Event
from tailrace.registers.events import EventKind

_BUSY = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Means over the steps that count."""

    steps: int
    """Steps that count."""
    step_s: float
    """Seconds of a step, from the end of one to that of the next."""
    samples_per_s: float
    tokens_per_s: float
    """Tokens of responses."""
    generating: float
    """Part of the time in which an engine computes; the mean of the engines."""
    training: float
    """Part of the time in which the trainer computes."""
    waiting_for_samples: float
    """Part of the time in which the trainer waits for samples."""
    grading: float
    """Part of the time in which a grader grades; the mean of the graders."""
    weights: float
    """Part of the time in which the trainer hands weights on, or waits until engines have them."""
    staleness: float
    """Mean staleness of the samples, in versions."""
    longest_s: float
    """Seconds of the longest response of a step, from its prompt on."""
    preemptions: int
    """In all steps."""


class Summing:
    """A sink that sums up a run."""

    def __init__(self, warm_up: int, count: int | None = None) -> None:
        """`warm_up`: steps that do not count. `count`: steps after these that do; by default all."""
        self._warm_up = warm_up
        self._end = None if count is None else warm_up + count
        self._steps: list[Event] = []
        self._shares: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        self._longest: dict[int, float] = defaultdict(float)
        self._graded_s = 0.0

    def __call__(self, event: Event) -> None:
        """Take in an event."""
        if self._end is not None and len(self._steps) == self._end:
            return
        if event.task == EventKind.STEP:
            self._steps.append(event)
        elif event.task == EventKind.BREAKDOWN and len(self._steps) >= self._warm_up:
            for phase, seconds in event.metrics.items():
                self._shares[event.actor][phase] += seconds
        elif event.task == EventKind.REWARD and len(self._steps) >= self._warm_up:
            self._graded_s += event.end - event.start
        elif event.task == EventKind.SAMPLE and event.step is not None:
            self._longest[event.step] = max(self._longest[event.step], event.end - event.start)

    def summary(self, *, preemptions: int, graders: int = 1) -> Summary:
        """The figures; the run has ended. `graders`: how many there are."""
        counted = self._steps[self._warm_up :]
        ends = [0.0, *(event.end for event in self._steps)]
        seconds = ends[-1] - ends[self._warm_up]
        engine, trainer = self._parts("engine"), self._parts("trainer")
        return Summary(
            steps=len(counted),
            step_s=seconds / len(counted),
            samples_per_s=_sum(event.samples for event in counted) / seconds,
            tokens_per_s=_sum(event.tokens for event in counted) / seconds,
            generating=engine.get("generation", 0.0),
            training=trainer.get("update", 0.0),
            waiting_for_samples=trainer.get("data", 0.0),
            grading=self._graded_s / (graders * seconds),
            weights=trainer.get("weights", 0.0) + trainer.get("weight_transfer", 0.0),
            staleness=statistics.fmean(event.metrics["staleness_mean"] for event in counted),
            longest_s=statistics.fmean(self._longest[event.step or 0] for event in counted),
            preemptions=preemptions,
        )

    def _parts(self, actor: str) -> dict[str, float]:
        spent = self._shares[actor]
        total = sum(spent.values())
        return {phase: seconds / total for phase, seconds in spent.items()} if total else {}


def _sum(counts: Iterable[int | None]) -> int:
    return sum(count or 0 for count in counts)


def binding(summary: Summary) -> str:
    """What binds: the stage that is busy for most of the time, or the longest response where none is for long."""
    stages = {
        "generation": summary.generating,
        "training": summary.training,
        "grading": summary.grading,
        "the way of weights": summary.weights,
    }
    name = max(stages, key=lambda stage: stages[stage])
    if stages[name] < _BUSY and summary.longest_s > _BUSY * summary.step_s:
        return "the longest response"
    return name
