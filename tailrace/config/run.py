"""The whole configuration of a run, and the checks that span several parts of it."""

from typing import Any, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from tailrace.config.algorithm import GrpoConfig, NoCorrection, TruncatedCorrection
from tailrace.config.base import Config
from tailrace.config.cluster import ClusterConfig
from tailrace.config.engine import EngineConfig, NativeEngineConfig, SamplingConfig
from tailrace.config.model import ModelConfig
from tailrace.config.pipeline import ObserveConfig, PipelineConfig
from tailrace.config.prompts import PromptsConfig
from tailrace.config.rewards import RewardsConfig
from tailrace.config.trainer import CheckpointConfig, EvaluationConfig, TrainerConfig
from tailrace.config.transfer import LocalQueueConfig, QueueConfig
from tailrace.config.weights import WeightsConfig, WeightsMode


class RunConfig(Config):
    """One training run."""

    output_dir: str = Field(min_length=1)
    """Directory of the run: events, checkpoints, report, exported model."""
    seed: int = 0
    """Fixes prompt order and every sample's random stream."""
    device: str = "cpu"
    """A torch device; only cpu has been tested."""
    threads: PositiveInt | None = None
    """Threads of torch; the machine's cores by default."""
    model: ModelConfig = ModelConfig()
    prompts: PromptsConfig
    rewards: RewardsConfig
    algorithm: GrpoConfig = GrpoConfig()
    sampling: SamplingConfig = SamplingConfig()
    engine: EngineConfig = NativeEngineConfig()
    queue: QueueConfig = LocalQueueConfig()
    trainer: TrainerConfig = TrainerConfig()
    pipeline: PipelineConfig = PipelineConfig()
    weights: WeightsConfig = WeightsConfig()
    cluster: ClusterConfig = ClusterConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    observe: ObserveConfig = ObserveConfig()

    @property
    def groups_per_step(self) -> int:
        """Prompts of a training step."""
        return self.trainer.train_batch_size // self.algorithm.group_size

    @property
    def groups_per_claim(self) -> int:
        """Groups that a rollout worker claims at once at the most: its share of a step."""
        workers = self.cluster.rollout.workers if self.pipeline.placement == "separated" else 1
        return -(-self.groups_per_step // workers)

    @property
    def mini_batch_size(self) -> int:
        """Samples of an optimizer step."""
        return self.trainer.mini_batch_size or self.trainer.train_batch_size

    @property
    def mini_batches_per_step(self) -> int:
        """Optimizer steps of a training step."""
        return self.trainer.train_batch_size // self.mini_batch_size

    @property
    def resolved_algorithm(self) -> GrpoConfig:
        """The algorithm with a correction for stale responses chosen, where the recipe leaves it open."""
        if self.algorithm.rollout_correction is not None:
            return self.algorithm
        correction = TruncatedCorrection() if self.pipeline.max_staleness else NoCorrection()
        return self.algorithm.model_copy(update={"rollout_correction": correction})

    @property
    def weights_mode(self) -> WeightsMode:
        """How new weights reach separate engines."""
        return self.weights.mode or ("in_flight" if self.pipeline.max_staleness else "synchronous")

    @property
    def wire_dtype(self) -> Literal["bfloat16", "float32"]:
        """Of floats of weights on their way to separate engines."""
        dtype: Literal["bfloat16", "float32"] = getattr(self.engine, "dtype", "bfloat16")
        return self.weights.dtype or dtype

    @model_validator(mode="before")
    @classmethod
    def _separate_workers_share_a_queue(cls, values: Any) -> Any:
        """The default is a queue that they can reach."""
        if isinstance(values, dict) and "queue" not in values and _placement(values) == "separated":
            return {**values, "queue": {"type": "service"}}
        return values

    @model_validator(mode="after")
    def _separate_workers_reach_the_queue(self) -> Self:
        if self.pipeline.placement == "separated" and self.queue.type == "local":
            raise ValueError(
                "queue.type local is inside one process, and pipeline.placement separated has several; "
                "use queue.type=service"
            )
        return self

    @model_validator(mode="after")
    def _batches_divide(self) -> Self:
        batch, group, mini = self.trainer.train_batch_size, self.algorithm.group_size, self.mini_batch_size
        if batch % group:
            raise ValueError(
                f"trainer.train_batch_size {batch} does not divide into groups of algorithm.group_size {group}; "
                f"use {max(group, batch // group * group)} or {(batch // group + 1) * group}"
            )
        if mini % group or batch % mini:
            raise ValueError(
                f"trainer.mini_batch_size {mini} must be a multiple of algorithm.group_size {group} "
                f"and divide trainer.train_batch_size {batch}"
            )
        return self

    @model_validator(mode="after")
    def _queue_holds_a_step(self) -> Self:
        steps = self.pipeline.max_staleness + 1
        needed = steps * self.trainer.train_batch_size
        if self.queue.type != "remote" and self.queue.max_rows < needed:
            raise ValueError(
                f"queue.max_rows {self.queue.max_rows} cannot hold the {needed} rows of "
                f"{'a step' if steps == 1 else f'{steps} steps'}; raise it to {needed} or more, or lower "
                f"trainer.train_batch_size or pipeline.max_staleness"
            )
        return self

    @model_validator(mode="after")
    def _samples_differ(self) -> Self:
        if self.sampling.temperature == 0:
            raise ValueError(
                "sampling.temperature is 0: the greedy samples of a group are all equal and teach nothing; use 1.0"
            )
        return self

    @model_validator(mode="after")
    def _in_order_streams(self) -> Self:
        if self.pipeline.in_order and not self.pipeline.streaming:
            raise ValueError("pipeline.in_order needs pipeline.streaming: true (without, it is always in order)")
        return self


def _placement(values: dict[str, Any]) -> Any:
    pipeline = values.get("pipeline")
    return pipeline.get("placement") if isinstance(pipeline, dict) else getattr(pipeline, "placement", None)
