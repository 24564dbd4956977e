"""What a decision about the number of engines is made from, and how a change of it is told.

samples, training ──▶ StepWatch ──a step's last event──▶ SeenStep ─┐
engines as they are ──▶ predicted: with one more, with one less ───┴─▶ decided ──▶ ScaleDecision ──▶ scale_event
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tailrace.events import Event
from tailrace.planning.dispatch.base import EngineState, Job
from tailrace.planning.dispatch.seconds import pulled
from tailrace.planning.elasticity import Elasticity, ScaleDecision
from tailrace.registers.events import TRAINED, EventKind
from tailrace.statistics.spans import covered_s

_TERMS = ("generation_s", "training_s", "lead_s", "saved_s", "lost_s")


@dataclass(slots=True)
class SeenStep:
    """What has been seen of a training step."""

    generated: list[tuple[float, float]] = field(default_factory=list)
    """The start and the end of each sample."""
    jobs: list[Job] = field(default_factory=list)
    trained: list[tuple[float, float]] = field(default_factory=list)
    """The start and the end of each computation on it, by all models that are trained."""
    since: float = float("-inf")
    """The end of the newest sample of the steps before it; see `StepTime`."""

    @property
    def generation_s(self) -> float:
        """Seconds in which samples of it were generated, and none of an earlier step any more."""
        return covered_s(self.generated, self.since)

    @property
    def training_s(self) -> float:
        """Seconds in which a model was trained on it. Several may be at the same time."""
        return covered_s(self.trained)


class StepWatch:
    """Keeps what a decision needs of a run's events."""

    def __init__(self) -> None:
        self._steps: defaultdict[int, SeenStep] = defaultdict(SeenStep)
        self._generated_until = float("-inf")
        """The end of the newest sample of the steps that have ended."""

    def see(self, event: Event) -> SeenStep | None:
        """Take in an event. The last one of a step returns what was seen of it."""
        if event.step is None:
            return None
        if event.task == EventKind.SAMPLE:
            step = self._steps[event.step]
            step.generated.append((event.start, event.end))
            prompt = int(event.info.get("prompt_tokens", 1))
            tokens = float(max(1, event.tokens or 1))
            step.jobs.append(
                Job(group=int(event.info["group"]), samples=1, prompt_tokens=prompt, expected_tokens=tokens)
            )
        elif event.task in TRAINED:
            self._steps[event.step].trained.append((event.start, event.end))
        elif event.task == EventKind.STEP:
            return self._ended(event.step)
        return None

    def _ended(self, number: int) -> SeenStep:
        seen = self._steps.pop(number, SeenStep())
        for older in [other for other in self._steps if other < number]:
            del self._steps[older]
        seen.since = self._generated_until
        self._generated_until = max([seen.since, *(end for _, end in seen.generated)])
        return seen


class Predicted(NamedTuple):
    """Seconds of a step's generation."""

    now_s: float
    more_s: float
    """With one engine more."""
    less_s: float
    """With one engine less."""


def predicted(states: Sequence[EngineState], one: EngineState, jobs: Sequence[Job]) -> Predicted:
    """Predict the generation of a step's samples.

    Args:
        states: all engines, without work.
        one: the one of these that there may be more or fewer of.
        jobs: the step's samples, one or more.
    """
    fewer = [state for state in states if state is not one] or states
    return Predicted(*(pulled(engines, jobs).seconds for engines in (states, [*states, one], fewer)))


def decided(elasticity: Elasticity, step: SeenStep, engines: int, seconds: Predicted) -> tuple[ScaleDecision, int]:
    """Decide after a step that so many engines of the pool have generated.

    Returns:
        The decision, and the engines that it asks for.
    """
    decision = elasticity.decide(
        engines=engines,
        generation_s=step.generation_s,
        training_s=step.training_s,
        saved_s=seconds.now_s - seconds.more_s,
        lost_s=seconds.less_s - seconds.now_s,
    )
    return decision, engines + {"add": 1, "release": -1, "hold": 0}[decision.action]


def scaled_text(before: int, after: int, by: str, decision: ScaleDecision | None = None) -> str:
    """A change of the number of a pool's engines in words."""
    why = "" if decision is None else f": {decision.why}"
    return f"{before} → {after} engines, by {by}{why}"


def scale_event(
    now: float,
    text: str,
    *,
    pool: str,
    by: str,
    before: int,
    wanted: int,
    engines: Sequence[str],
    decision: ScaleDecision | None = None,
) -> Event:
    """The event of a change that was made, or tried.

    Args:
        before: engines of all pools.
        wanted: those that were asked for, likewise.
        engines: the names of those that there are now.
    """
    metrics = {"engines": float(before), "wanted": float(wanted)}
    if decision is not None:
        metrics |= {name: getattr(decision, name) for name in _TERMS}
    info = {"text": text, "by": by, "pool": pool, "engines": list(engines)}
    return Event(task=EventKind.SCALE, actor="driver", start=now, end=now, metrics=metrics, info=info)
