"""What a plan foretells of a run: a file beside its recipe, which the run takes along into its directory.

The figures are those that the run will tell of itself, since they are made of the simulated run's events by the same
functions (`report.step_figures`).
"""

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from tailrace.errors import UNREADABLE, PlanError, one_line
from tailrace.planning.dispatch.costs import NotNegative, StepCosts

FORMAT = 1
Positive = Annotated[float, Meta(gt=0)]


class StepFigures(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A mean training step: how long its parts took, and what they had to do."""

    steps: Annotated[int, Meta(ge=1)]
    """Steps that the mean is of."""
    step_s: Positive
    generation_s: NotNegative
    """Seconds in which an engine generated; the mean of the engines."""
    install_s: NotNegative
    """Seconds in which an engine took new weights in; the mean of the engines."""
    reward_s: NotNegative
    """Seconds in which something was graded."""
    reference_s: NotNegative
    """Seconds in which the reference scored something."""
    critic_s: NotNegative = 0.0
    """Seconds in which a model beside the policy computed, such as a critic."""
    training_s: NotNegative
    """Seconds in which the trainer computed."""
    weights_s: NotNegative
    """Seconds in which the trainer handed weights on, or waited until engines had them."""
    arrival_s: NotNegative
    """Seconds from an update until an engine had its weights; the mean of the engines."""
    waiting_s: NotNegative
    """Seconds in which the trainer waited for samples."""
    optimizer_s: NotNegative
    """The optimizer's part of `training_s`."""
    samples: Positive
    """Responses of a step."""
    prompt_tokens: NotNegative
    """Of a prompt."""
    response_tokens: Positive
    """Generated tokens of a response."""
    longest_tokens: Positive
    """Generated tokens of a step's longest response."""
    trained_tokens: Positive
    """Tokens of a step that are trained on; a prompt that a group shares counts once."""
    engines: Positive
    """Engines that generated."""
    batch: Positive
    """Responses that an engine had at a time, while it generated."""
    context: Positive
    """Tokens of a response and its prompt, in the mean of all generated tokens."""
    token_s: Positive
    """Seconds from a token of a response to the next: of a decode step, and of what came between."""
    grading_s: NotNegative
    """Seconds of the grading of a response."""
    staleness: NotNegative
    """Of the samples, in versions."""

    @property
    def trained_token_s(self) -> float:
        """Seconds of the trainer for a token, without the optimizer."""
        return max(0.0, self.training_s - self.optimizer_s) / self.trained_tokens


class Peak(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The memory of a device at its worst instant."""

    bytes: Positive
    instant: str


class Foretold(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A prediction."""

    tailrace_plan: int = FORMAT
    of: str
    """What it is of, in words: the model, the workload, the devices."""
    rests_on: str
    """What its step times rest on, in words."""
    least_s: Positive
    """The least seconds of a step that were to be expected."""
    most_s: Positive
    figures: StepFigures
    decode: StepCosts
    """The decode steps of a replica, as the plan's step times have them."""
    replicas: Annotated[int, Meta(ge=1)]
    """Replicas of an engine."""
    memory: dict[str, Peak] = {}
    """By the kind of worker: rollout, trainer, critic."""
    trainer_devices: Annotated[int, Meta(ge=1)] = 1
    """Devices that train the policy."""

    def decode_s(self, figures: StepFigures) -> float:
        """Seconds of a decode step of a batch as it was in a run, by the plan's step times."""
        own = max(1.0, figures.batch / self.replicas)
        return self.decode.step_s(1, own, own * figures.context, self.replicas)

    def token_s(self, figures: StepFigures) -> float:
        """`StepFigures.token_s` that was to be expected of such a batch."""
        before, now = self.decode_s(self.figures), self.decode_s(figures)
        return self.figures.token_s * (now / before if before > 0 else 1.0)


def content_of(path: Path, *, name: str) -> bytes:
    """Read the file of a prediction, and check that it holds one. `name`: what a message calls it.

    Raises:
        PlanError: it cannot be read, or is no prediction of this version.
    """
    try:
        content = path.read_bytes()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else one_line(error)
        raise PlanError(f"{name} cannot be read: {reason}; write it with tailrace plan --output") from None
    _decoded(content, name)
    return content


def read_foretold(path: Path) -> Foretold:
    """Read a prediction.

    Raises:
        PlanError: see `content_of`.
    """
    return _decoded(content_of(path, name=str(path)), str(path))


def _decoded(content: bytes, name: str) -> Foretold:
    try:
        found = msgspec.json.decode(content, type=Foretold)
    except UNREADABLE as error:
        raise PlanError(
            f"{name} is no prediction: {one_line(error)}; tailrace plan --output writes one beside the recipe"
        ) from None
    if found.tailrace_plan != FORMAT:
        raise PlanError(
            f"{name} is a prediction of form {found.tailrace_plan}, and this Tailrace reads form {FORMAT}; plan anew"
        )
    return found
