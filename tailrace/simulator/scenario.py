"""What is simulated: engines, a trainer, graders and the way of the weights between them, in plain numbers.

All times come from here, all decisions from `planning`, and from the algorithm which groups are remade.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from tailrace.config.engine import AdaptiveTPConfig
from tailrace.config.rollout import DispatchConfig, Order
from tailrace.config.weights import WeightsMode
from tailrace.errors import PlanError
from tailrace.host.user_code import describe
from tailrace.planning.dispatch.moving import LinkEnd
from tailrace.planning.elasticity import ScaleLimits
from tailrace.planning.packing import GroupPart
from tailrace.planning.step_times.base import MixedStepTimes
from tailrace.planning.tp_profile import TPProfile
from tailrace.workloads.replay import Script

NOT_SENT = LinkEnd(form=None)
"""Of engines whose keys and values stay where they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rearranging:
    """How an engine changes its TP degree (PAT)."""

    config: AdaptiveTPConfig
    profile: TPProfile
    """What it decides by, and what its switches cost."""
    cache_tokens: Mapping[int, float]
    """Tokens that a replica's cache holds, by degree."""
    kv_bytes_per_token: int
    """Of the whole model."""
    limit: int
    """The most tokens that a request allows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineKind:
    """Engines that are alike."""

    name: str = "rollout"
    """Of their pool."""
    engines: int = 1
    times: MixedStepTimes
    tp: int = 1
    dp: int = 1
    """Replicas of the model in an engine."""
    adaptive_tp: Rearranging | None = None
    """None where the two stay as they are."""
    slots: int = 128
    """The most sequences that a replica decodes together."""
    cache_tokens: float = 2.0**40
    """Tokens that a replica's cache holds."""
    prefill_tokens: int = 4096
    counts_decoding: bool = False
    """See `Batch`."""
    block: int = 64
    starts_s: float = 0.0
    """Seconds from the start of the run until they can generate."""
    arrive_s: float = 0.0
    """Seconds from the publication of weights until they have arrived at such an engine."""
    install_s: float = 0.0
    """Seconds in which an engine stands still for them."""
    recomputes: bool = False
    """Whether it computes anew what older weights have computed of responses under way."""
    link: LinkEnd = NOT_SENT
    """The way of keys and values to and from an engine; without a form they are computed again elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Elastic:
    """A pool whose number of engines the run chooses."""

    limits: ScaleLimits
    joining: EngineKind
    """An engine that is added. Its name is that of the pool; `starts_s` are the seconds until it is given prompts."""


class TrainerTimes(Protocol):
    """Seconds of a trainer's work. Ranks share samples, so each of these is the time of the slowest one."""

    def update_s(self, micro_batch: Sequence[GroupPart]) -> float:
        """Seconds of the forward and backward passes of a stage over a micro-batch."""
        ...

    def score_s(self, micro_batch: Sequence[GroupPart]) -> float:
        """Seconds of a stage for the log-probabilities of a micro-batch."""
        ...

    def optimizer_s(self) -> float:
        """Seconds of an optimizer step."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerKind:
    """The trainer of a model."""

    times: TrainerTimes
    ranks: int = 1
    """Ranks that share the samples."""
    stages: int = 1
    """Stages of a pipeline, which is filled and emptied for what the trainer is handed at once."""
    publish_s: float = 0.0
    """Seconds of a step in which the trainer stands still to hand its weights on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scorer:
    """Workers that compute log-probabilities with frozen weights, or a critic's values."""

    times: TrainerTimes
    workers: int = 1
    stages: int = 1
    """Stages of the pipeline of each worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remaking:
    """When a group is thrown away, and another prompt takes its place in the training step (DAPO, section 3.2)."""

    decide: Callable[[Sequence[Mapping[str, Any]]], bool]
    """The algorithm's own decision, from the samples of a group. Each has `reward`, NaN where unknown, and
    `finish_reason` alone."""
    most: int
    """How often a place is remade. After that its group stays as it is."""

    def wants(self, scripts: Sequence[Script]) -> bool:
        """Whether a group is to be remade. One without rewards is if the filter of its source threw it away.

        Raises:
            PlanError: the algorithm's decision has failed.
        """
        if all(script.reward is None for script in scripts):
            return all(script.kept is False for script in scripts)
        try:
            return self.decide([_cells(script) for script in scripts])
        except Exception as error:  # the code of an algorithm may raise anything
            raise PlanError(
                f"the algorithm's decision to remake a group has failed: {describe(error)}; plans and simulations "
                "give it the columns reward and finish_reason alone, so leave out its `remake` for them"
            ) from error

    def attempts(self, share: float) -> float:
        """Groups that are generated for each that is trained on, in the mean. `share`: of groups that are
        remade."""
        return sum(share**number for number in range(self.most + 1))

    def rounds(self, share: float, places: int) -> float:
        """Groups that the slowest of so many places has, one after the other, in the mean."""
        return sum(1 - (1 - share**number) ** places for number in range(self.most + 1))


def _cells(script: Script) -> Mapping[str, Any]:
    return {
        "reward": math.nan if script.reward is None else script.reward,
        "finish_reason": script.finish_reason.value,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A run."""

    steps: int
    groups_per_step: int
    group_size: int
    mini_batches: int = 1
    """Parts of a training step, each of which makes an optimizer step."""
    epochs: int = 1
    """How often a training step goes through its samples."""
    micro_batch_tokens: int = 4096
    placement: Literal["colocated", "separated"] = "separated"
    max_staleness: int = 0
    streaming: bool = False
    in_order: bool = False
    weights: WeightsMode = "synchronous"
    dispatch: DispatchConfig = field(default_factory=DispatchConfig)
    order: Order = "first_in"
    knows_lengths: Literal["nothing", "group_means", "lengths", "siblings"] = "nothing"
    """What is expected of responses: nothing, the mean of their group, their length, or what is learned from others of
    their group."""
    expectation_error: float = 0.0
    """The standard deviation of the logarithm of what is expected, from the logarithm of a mean or a length."""
    lengths_discount: float = 0.98
    """The weight that a response keeps with each newer version, where lengths are learned."""
    engines: tuple[EngineKind, ...]
    elastic: Elastic | None = None
    trainer: TrainerKind
    reference: Scorer | None = None
    critic: TrainerKind | None = None
    """The trainer of a model that gives values, and is trained beside the policy."""
    whole_steps: bool = False
    """Whether advantages are computed of all samples of a training step together."""
    remaking: Remaking | None = None
    """When groups are remade; None: never."""
    graders: int = 1
    grade_s: float = 0.0
    """Seconds of a grading, where the workload does not say."""
    engine_beside: float = 1.0
    """How many times longer a step of an engine takes while the trainer computes, since they share a machine."""
    trainer_beside: float = 1.0
    """How many times longer the trainer takes while an engine computes."""
    engine_failures_per_hour: float = 0.0
    """Deaths of an engine's process in an hour, in the mean; they are independent of each other."""
    restart_s: float = 120.0
    """Seconds until a dead engine is back."""
    moves: bool = True
    """Whether running responses move to engines with room, where the policy weighs engines against each other."""
    hop_s: float = 0.0
    """Seconds that a row takes from one task to the next, through the queue."""
    step_s: float = 0.0
    """Seconds of a training step besides all work: claims, acks, events."""
    seed: int = 0
