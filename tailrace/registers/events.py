"""The kinds of events. Emitters name a kind; display, report, timeline, Prometheus and TensorBoard read its entry."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, Self

from tailrace.registers.prometheus import WORKER_DEATHS, WORKER_STARTS, Series

BLUE, ORANGE, GREEN, RED, PURPLE, GREY = "#4285c9", "#d97f26", "#22997a", "#cf4f45", "#9069c6", "#84909c"
"""Colours that are legible on white and on black, and distinct for people who confuse red and green. So are the kinds'
own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """The display and counting of a kind of event."""

    meaning: str
    """A sentence for `docs/metrics.md`, in Markdown."""
    is_work: bool = True
    """Whether it is a span of work: a bar in the timeline."""
    colour: str | None = None
    """Colour of its bars in the timeline; None takes one that is left."""
    row: Literal["actor", "worker", "weights", "responses"] = "actor"
    """Row in the timeline: that of its actor, that of its worker, the worker's row of weights, or thin bars below."""
    mark: Literal["run", "worker"] | None = None
    """Mark in the timeline: across the run, or at its worker."""
    is_timed: bool = False
    """Whether a `step` event carries the seconds that this work took since the step before, as `time/<task>`."""
    gives_version: bool = False
    """Whether its worker has the weights `version` from the event's end on."""
    step_is_count: bool = False
    """Whether its `step` is the number of steps before it; otherwise it is a step's number, from 0."""
    scalars: Literal["train", "eval"] | None = None
    """The prefix of its metrics in TensorBoard and W&B; None leaves them out."""
    series: Series | None = None
    """The Prometheus counter of these events, for each worker."""
    survives_resume: bool = False
    """Whether the event stays true when a resumed run discards what it had done after its checkpoint."""
    phase: str = ""
    """The phase of the run that the display shows after this event; empty changes nothing."""
    tells: str = ""
    """The entry of `info` that a log line shows; empty for no such line."""
    is_urgent: bool = False
    """Whether that line also stands on a terminal, above the live display."""


class EventKind(StrEnum):
    """The values of `Event.task`. They stand in `events.jsonl`, so they never change.

    The tasks of a caller's own queue table are not listed; `about` has an entry for them all the same.
    """

    about: About

    def __new__(cls, task: str, about: About) -> Self:
        """Make a member whose value is `task`."""
        kind = str.__new__(cls, task)
        kind._value_ = task
        kind.about = about
        return kind

    RUN = (
        "run",
        About(
            meaning="The start of an attempt at the run: a new run, or one that goes on from a checkpoint.",
            is_work=False,
            mark="run",
            phase="starting",
        ),
    )
    END = "end", About(meaning="How the run has ended: absent where it was killed.", is_work=False)
    STEP = (
        "step",
        About(
            meaning="One training step. A mean is over its samples, or over its response tokens, as said.",
            colour=GREY,
            scalars="train",
            phase="generating",
        ),
    )
    EVALUATION = (
        "evaluation",
        About(
            meaning="Answers to prompts that are not trained on ([evaluation.py](../tailrace/run/evaluation.py)).",
            colour=PURPLE,
            step_is_count=True,
            scalars="eval",
            phase="generating",
        ),
    )
    ROLLOUT = (
        "rollout",
        About(
            meaning="The responses to prompts that an engine was given together.",
            colour=BLUE,
            is_timed=True,
            phase="grading",
        ),
    )
    SAMPLE = "sample", About(meaning="One response, while it is generated.", colour="#7fb0de", row="responses")
    REWARD = (
        "reward",
        About(meaning="The grading of one claim of responses.", colour=ORANGE, is_timed=True, phase="training"),
    )
    REFERENCE = (
        "reference",
        About(meaning="Log-probabilities of the initial weights.", colour="#b59a2b", is_timed=True, phase="training"),
    )
    ADVANTAGE = (
        "advantage",
        About(meaning="The advantages of whole groups.", colour="#c978a6", is_timed=True, phase="training"),
    )
    ACTOR = (
        "actor",
        About(
            meaning="Forward and backward passes over one part of a batch.",
            colour=GREEN,
            is_timed=True,
            phase="training",
        ),
    )
    OPTIMIZER = (
        "optimizer",
        About(meaning="One optimizer step.", colour="#5fbf9f", is_timed=True, phase="training"),
    )
    UPDATE_WEIGHTS = (
        "update_weights",
        About(
            meaning="The installation of new weights in an engine.",
            colour=RED,
            is_timed=True,
            gives_version=True,
            phase="generating",
        ),
    )
    WEIGHTS_PUBLISH = (
        "weights_publish",
        About(
            meaning="The publication of one version of the weights, in separated runs ([weights.md](weights.md)).",
            colour="#a8559b",
            gives_version=True,
        ),
    )
    WEIGHTS_TRANSFER = (
        "weights_transfer",
        About(
            meaning="The way of one version of the weights to a worker, in separated runs ([weights.md](weights.md)).",
            colour="#e2958c",
            row="weights",
        ),
    )
    WEIGHTS_WAIT = "weights_wait", About(meaning="The trainer waits until engines have its weights.", colour="#c3a06a")
    EVALUATION_WAIT = (
        "evaluation_wait",
        About(
            meaning="New weights wait until the answers of an evaluation are generated.",
            colour="#b08bc4",
        ),
    )
    WEIGHTS_DRAIN = (
        "weights_drain",
        About(meaning="An engine finishes its responses before new weights go in.", colour="#8f8fc0"),
    )
    WEIGHTS_IN_FLIGHT = (
        "weights_in_flight",
        About(
            meaning="From the publication of weights until a worker has installed them. Made by the report.",
            colour="#b9a09d",
        ),
    )
    CHECKPOINT = (
        "checkpoint",
        About(
            meaning="The writing of a checkpoint.",
            colour="#a4734b",
            step_is_count=True,
            phase="generating",
            tells="path",
        ),
    )
    EXPORT = (
        "export",
        About(meaning="The writing of the trained model.", colour="#b7a595", phase="finished", tells="path"),
    )
    SAMPLES = (
        "samples",
        About(
            meaning="Texts for people, see [observing.md](observing.md#samples); `samples.jsonl` has them.",
            is_work=False,
        ),
    )
    WARNING = (
        "warning",
        About(
            meaning=(
                "A sign that nothing is learned, see [observing.md](observing.md#warnings): the figure that has passed "
                "its bound, under the name of the sign ([signs.py](../tailrace/planning/signs.py)). The warning of "
                "`on_policy_mismatch` has none."
            ),
            is_work=False,
            tells="text",
            is_urgent=True,
        ),
    )
    WORKER_STARTED = (
        "worker_started",
        About(
            meaning="The start of a worker's process, in separated runs.",
            colour="#9aa84f",
            row="worker",
            series=WORKER_STARTS,
        ),
    )
    WORKER_WAITS = (
        "worker_waits",
        About(
            meaning="A worker has no place in the cluster yet, and waits for one. `info.text` says for what.",
            is_work=False,
            tells="text",
            is_urgent=True,
        ),
    )
    WORKER_DIED = (
        "worker_died",
        About(
            meaning="The death of a worker's process, in separated runs.",
            is_work=False,
            row="worker",
            mark="worker",
            series=WORKER_DEATHS,
            survives_resume=True,
            is_urgent=True,
        ),
    )
    ACTIVITY = (
        "activity",
        About(
            meaning=(
                "Where the time of one worker went, about once a second ([activity.py](../tailrace/activity.py)); of "
                "the engine, the graders and the trainer where a run is one process."
            ),
            is_work=False,
        ),
    )
    BREAKDOWN = (
        "breakdown",
        About(
            meaning=(
                "The same time by phase, and the parts of phases ([phases.py](../tailrace/registers/phases.py)); about "
                "once a second, and where a worker trains, at the end of each step, too."
            ),
            is_work=False,
        ),
    )
    MEMORY = (
        "memory",
        About(
            meaning=(
                "The contents of one worker's memory, at the same times ([memory.py](../tailrace/tasks/memory.py)). "
                "A run of one process tells them as `driver`."
            ),
            is_work=False,
        ),
    )
    QUEUE = (
        "queue",
        About(
            meaning=(
                "What the transfer queue holds, about once a second ([observer.py](../tailrace/run/observer.py))."
            ),
            is_work=False,
        ),
    )
    DISPATCH = (
        "dispatch",
        About(
            meaning=(
                "A check of the lengths that were expected of one training step, and of what placing prompts by them "
                "gained ([generation.md](generation.md), [foresight.py](../tailrace/rollout/foresight.py))."
            ),
            is_work=False,
        ),
    )
    DISPATCH_CHANGE = (
        "dispatch_change",
        About(
            meaning=(
                "Prompts are pulled from now on, or placed again: because of a check, or since lengths cannot be had."
            ),
            is_work=False,
            mark="run",
            tells="text",
        ),
    )
    MOVE = (
        "move",
        About(
            meaning=(
                "A response that runs is to go on in another engine ([generation.md](generation.md), "
                "[moving.py](../tailrace/planning/dispatch/moving.py)). `info` has the two engines (`source`, "
                "`target`) and the `way`: `recompute` or `transfer`."
            ),
            is_work=False,
        ),
    )
    SCALE = (
        "scale",
        About(
            meaning=(
                "A decision about the number of engines of a pool, with all of its terms "
                "([generation.md](generation.md), [elasticity.py](../tailrace/planning/elasticity.py)). `info.pool` "
                "names the pool. Decisions to change nothing are left out."
            ),
            is_work=False,
            mark="run",
            tells="text",
        ),
    )
    ADAPTIVE_TP = (
        "adaptive_tp",
        About(
            meaning=(
                "One decision about tensor parallelism ([tp_verdict.py](../tailrace/planning/tp_verdict.py), "
                "[adaptive_tp.md](adaptive_tp.md))."
            ),
        ),
    )


TRAINED = (EventKind.ACTOR, EventKind.OPTIMIZER)
"""The events whose seconds are those of training."""
_OTHER = About(meaning="A task of a caller's own.")
ABOUT = {str(kind): kind.about for kind in EventKind}
"""The entries by `Event.task`."""


def about(task: str) -> About:
    """Return the entry of `Event.task`; where the register has none, that of a piece of work."""
    return ABOUT.get(task, _OTHER)


def title(task: str) -> str:
    """Return the title of `Event.task`, such as update weights."""
    return task.replace("_", " ")
