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
    critic: float
    """Part of the time in which a critic computes; 0 where there is none."""
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

    def __init__(self, warm_up: int) -> None:
        """`warm_up`: steps that do not count."""
        self._warm_up = warm_up
        self._steps: list[Event] = []
        self._ends: list[float] = []
        """When each step has ended, and another model's part of it, too."""
        self._shares: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        self._longest: dict[int, float] = defaultdict(float)
        self._graded_s = 0.0

    def __call__(self, event: Event) -> None:
        """Take in an event."""
        if event.task == EventKind.OPTIMIZER and event.step == len(self._steps) - 1:
            self._ends[-1] = event.end  # another model is trained for longer than the policy
        if event.task == EventKind.STEP:
            self._steps.append(event)
            self._ends.append(event.end)
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
        ends = [0.0, *self._ends]
        seconds = ends[-1] - ends[self._warm_up]
        engine, trainer = self._parts("engine"), self._parts("trainer")
        return Summary(
            steps=len(counted),
            step_s=seconds / len(counted),
            samples_per_s=_sum(event.samples for event in counted) / seconds,
            tokens_per_s=_sum(event.tokens for event in counted) / seconds,
            generating=engine.get("generation", 0.0),
            training=trainer.get("update", 0.0),
            critic=self._parts("critic").get("update", 0.0),
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
        "the critic": summary.critic,
        "grading": summary.grading,
        "the way of weights": summary.weights,
    }
    name = max(stages, key=lambda stage: stages[stage])
    if stages[name] < _BUSY and summary.longest_s > _BUSY * summary.step_s:
        return "the longest response"
    return name
