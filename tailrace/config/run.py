"""The whole configuration of a run, and the checks that span several parts of it."""

import math
from collections.abc import Mapping
from typing import Any, Self

from pydantic import model_validator

from tailrace.config.algorithm import AlgorithmConfig, DapoConfig, GrpoConfig, NoCorrection, PolicyGradientConfig
from tailrace.config.base import Config, Device, PathText, Processes, Seed, is_slow_in_bfloat16, key_of, with_default
from tailrace.config.cluster import ROLLOUT, ClusterConfig, NamedPoolConfig, reward_pool
from tailrace.config.engine import DType, EngineConfig, NativeEngineConfig, OnDevice, SamplingConfig, in_fast_dtype
from tailrace.config.evaluation import EvaluationConfig
from tailrace.config.model import ModelConfig
from tailrace.config.overrides import merged
from tailrace.config.pipeline import ObserveConfig, PipelineConfig
from tailrace.config.prompts import PromptsConfig
from tailrace.config.rewards import RewardsConfig
from tailrace.config.rollout import RolloutConfig
from tailrace.config.trainer import CheckpointConfig, TrainerConfig
from tailrace.config.transfer import LocalQueueConfig, QueueConfig, controllers_of
from tailrace.config.weights import ONE_VERSION, WeightsConfig, WeightsMode


class RunConfig(OnDevice):
    """The configuration of a training run."""

    output_dir: PathText
    """Directory of the run: events, checkpoints, report, exported model."""
    seed: Seed = 0
    """Seed of the prompt order and of every sample's random stream."""
    device: Device = "cpu"
    """cpu, cuda, cuda:N, xpu, xpu:N or mps; tested on CPUs, and on one NVIDIA GPU."""
    threads: Processes | None = None
    """PyTorch threads, with `pipeline.placement: colocated`; by default as many as the machine has cores. Separate
    workers have those of their pools in `cluster`."""
    model: ModelConfig = ModelConfig()
    prompts: PromptsConfig
    rewards: RewardsConfig
    algorithm: AlgorithmConfig = GrpoConfig()
    sampling: SamplingConfig = SamplingConfig()
    engine: EngineConfig = NativeEngineConfig()
    rollout: RolloutConfig = RolloutConfig()
    queue: QueueConfig = LocalQueueConfig()
    """The transfer queue. Without a type it is local, or service with `pipeline.placement: separated`."""
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
        """The most groups that a rollout worker claims at once: its share of a step."""
        workers = self.cluster.rollout.total if self.pipeline.placement == "separated" else 1
        return -(-self.groups_per_step // workers)

    @property
    def engines(self) -> dict[str, EngineConfig]:
        """The engines of each pool of rollout workers, by its name; without separate workers there is one.

        On CPUs, the threads of its worker and the engines beside it are filled in, where the recipe leaves them open.
        """
        if self.pipeline.placement != "separated":
            return {ROLLOUT: _with_threads(self.engine, self.threads) if self.device == "cpu" else self.engine}
        pools = self.cluster.rollout.each
        own = {name: pool.engine for name, pool in pools.items() if isinstance(pool, NamedPoolConfig)}
        engines = {name: own.get(name) or self.engine for name in pools}
        if self.device != "cpu":
            return engines
        engines = {name: _with_threads(engine, pools[name].threads_each) for name, engine in engines.items()}
        if self.cluster.address is not None:  # the number of engines on a machine is not known
            return engines
        return {name: _beside_others(engine, self.cluster.rollout.total) for name, engine in engines.items()}

    @property
    def grading_places(self) -> int:
        """The responses that all reward workers together grade at a time, of the reward with the fewest."""
        return min(self._reward_workers(name) * grading.places for name, grading in self.rewards.each.items())

    def with_grading_places(self, least: int) -> Self:
        """The same with processes that grade so many responses at a time in all reward workers together."""
        of_each_worker = {name: -(-least // self._reward_workers(name)) for name in self.rewards.each}
        return self.model_copy(update={"rewards": self.rewards.with_places(of_each_worker)})

    def _reward_workers(self, name: str) -> int:
        """The workers that grade for a reward, by its name in `RewardsConfig.each`."""
        if self.pipeline.placement != "separated":
            return 1
        return self.cluster.pool(reward_pool(name)).workers

    def least_rows(self, max_staleness: int) -> int:
        """The rows that the queue has to hold with such a bound: those of the steps that are under way at once."""
        size = self.algorithm.group_size
        controllers = controllers_of(self.queue)
        of_each = -(-(max_staleness + 1) * self.groups_per_step // controllers)  # groups, of the one with most
        return of_each * size * controllers

    @property
    def mini_batch_size(self) -> int:
        """Samples of an optimizer step."""
        return self.trainer.mini_batch_size or self.trainer.train_batch_size

    @property
    def mini_batches_per_step(self) -> int:
        """Parts of a training step, each of which makes an optimizer step."""
        return self.trainer.train_batch_size // self.mini_batch_size

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps of a training step."""
        return self.mini_batches_per_step * self.trainer.epochs

    @property
    def resolved_algorithm(self) -> AlgorithmConfig:
        """The algorithm, with what the recipe leaves open chosen, such as a correction for stale responses."""
        return self.algorithm.resolved(
            max_staleness=self.pipeline.max_staleness, max_new_tokens=self.sampling.max_new_tokens
        )

    @property
    def resolved(self) -> Self:
        """The configuration, with everything that the recipe leaves open chosen as the run will."""
        dispatch = self.rollout.dispatch.model_copy(update={"order": self.rollout.order})
        chosen: dict[str, Any] = {
            "algorithm": self.resolved_algorithm,
            "rollout": self.rollout.model_copy(update={"dispatch": dispatch}),
        }
        if self.pipeline.placement == "separated":
            chosen["weights"] = self.weights.model_copy(update={"mode": self.weights_mode, "dtype": self.wire_dtype})
        return self.model_copy(update=chosen)

    @property
    def mismatch_bounds(self) -> tuple[float, float]:
        """The bounds `trainer.mismatch_warning` and `trainer.mismatch_error`; infinite where the two sides are not
        comparable.

        Rounding gives 3e-6 in fp32 and 0.03 to 0.045 in bf16, in the mean over SmolLM2-135M's own samples.
        """
        if self._cut_by is not None or not all(engine.samples_the_model for engine in self.engines.values()):
            return math.inf, math.inf
        exact = self.trainer.precision == "fp32" and all(
            engine.computing_dtype == "float32" for engine in self.engines.values()
        )
        warning, error = (0.001, 0.1) if exact else (0.15, 0.5)
        error = self.trainer.mismatch_error or max(error, self.trainer.mismatch_warning or 0.0)
        return min(self.trainer.mismatch_warning or warning, error), error

    @property
    def _cut_by(self) -> str | None:
        """The sampling setting that leaves out tokens, so that the others become more likely; None where there is
        none."""
        sampling = self.sampling
        cut = {"top_k": sampling.top_k > 0, "top_p": sampling.top_p < 1, "min_p": sampling.min_p > 0}
        return next((name for name in cut if cut[name]), None)

    @property
    def weights_mode(self) -> WeightsMode:
        """The mode in which new weights reach separate engines."""
        return self.weights.mode or ("in_flight" if self.pipeline.max_staleness else "synchronous")

    @property
    def generated_in(self) -> DType | None:
        """The dtype that all engines compute in, float32 where they differ; None where it is not known of any."""
        dtypes = {engine.computing_dtype for engine in self.engines.values()}
        if len(dtypes) > 1:
            return "float32"
        return dtypes.pop()

    @property
    def wire_dtype(self) -> DType:
        """The dtype of weights on their way to separate engines; float32 where the engines' dtype is not known."""
        return self.weights.dtype or self.generated_in or "float32"

    @classmethod
    def default_type(cls, section: str, values: Mapping[str, Any]) -> str | None:
        """Return `service` for the queue of separate workers, which they can all reach."""
        if section == "queue" and _placement(values) == "separated":
            return "service"
        return super().default_type(section, values)

    @model_validator(mode="before")
    @classmethod
    def _has_a_queue(cls, values: Any) -> Any:
        if isinstance(values, dict) and "queue" not in values:
            return {**values, "queue": {"type": cls.default_type("queue", values)}}
        return values

    @model_validator(mode="before")
    @classmethod
    def _pools_have_whole_engines(cls, values: Any) -> Any:
        """Give the engine of each further rollout pool the keys of `engine` that it leaves out."""
        pools = key_of(key_of(key_of(values, "cluster", None), "rollout", None), "pools", None)
        if not isinstance(values, dict) or not isinstance(pools, dict):
            return values
        engine = values.get("engine", {"type": "native"})
        engine = engine.model_dump() if isinstance(engine, Config) else engine
        for name, pool in pools.items():
            own = key_of(pool, "engine", None)
            if isinstance(own, dict) and isinstance(engine, dict):
                whole = merged(engine, own)
                whole = in_fast_dtype(whole) if is_slow_in_bfloat16(values) else whole
                values = merged(values, {"cluster": {"rollout": {"pools": {name: {"engine": whole}}}}})
        return values

    @model_validator(mode="before")
    @classmethod
    def _trains_as_the_device_can(cls, values: Any) -> Any:
        if is_slow_in_bfloat16(values):
            return {**values, "trainer": with_default(values.get("trainer", {}), "precision", "fp32")}
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
    def _separate_workers_have_threads_of_their_own(self) -> Self:
        if self.pipeline.placement == "separated" and self.threads is not None:
            raise ValueError(
                f"threads {self.threads} is for pipeline.placement colocated; leave it out, and give separate workers "
                f"theirs: cluster.rollout.threads, cluster.trainer.threads, ..."
            )
        return self

    @model_validator(mode="after")
    def _engines_can_take_weights_so(self) -> Self:
        if self.pipeline.placement == "colocated" and self.weights.mode in ONE_VERSION:
            raise ValueError(
                f"weights.mode {self.weights.mode} is for pipeline.placement separated; colocated, the engine takes "
                f"new weights at once: leave weights.mode out"
            )
        return self

    @model_validator(mode="after")
    def _penalties_are_of_the_last_tokens(self) -> Self:
        algorithm = self.resolved_algorithm
        if not isinstance(algorithm, DapoConfig):
            return self
        tokens, longest = algorithm.overlong.penalty_tokens, algorithm.max_response_tokens or 0
        if tokens > longest:
            raise ValueError(
                f"algorithm.overlong.penalty_tokens {tokens} is more than the longest response has, {longest}; lower "
                "it, or raise sampling.max_new_tokens"
            )
        return self

    @model_validator(mode="after")
    def _corrections_compare_like_with_like(self) -> Self:
        name, algorithm = self._cut_by, self.resolved_algorithm
        if name is None or not isinstance(algorithm, PolicyGradientConfig):
            return self
        if algorithm.rollout_rejection is not None or not isinstance(algorithm.rollout_correction, NoCorrection):
            raise ValueError(
                f"sampling.{name} raises the probabilities of what is sampled, which algorithm.rollout_correction "
                f"and rollout_rejection compare with those of the whole softmax: every ratio would be too low; leave "
                f"sampling.{name} out, or give algorithm.rollout_correction.type=none and no rollout_rejection"
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
    def _warns_before_it_ends(self) -> Self:
        warning, error = self.trainer.mismatch_warning, self.trainer.mismatch_error
        if warning is not None and error is not None and warning > error:
            raise ValueError(
                f"trainer.mismatch_warning {warning:g} is above trainer.mismatch_error {error:g}, which ends the run "
                "first; lower it"
            )
        return self

    @model_validator(mode="after")
    def _queue_holds_a_step(self) -> Self:
        steps, needed = self.pipeline.max_staleness + 1, self.least_rows(self.pipeline.max_staleness)
        if self.queue.type != "remote" and self.queue.max_rows < needed:
            raise ValueError(
                f"queue.max_rows {self.queue.max_rows} cannot hold the {needed} rows of "
                f"{'a step' if steps == 1 else f'{steps} steps'}; raise it to {needed} or more, or lower "
                f"trainer.train_batch_size or pipeline.max_staleness"
            )
        return self

    @model_validator(mode="after")
    def _lengths_are_known_where_they_are_needed(self) -> Self:
        lengths, dispatch = self.rollout.lengths, self.rollout.dispatch
        if lengths is None:
            if any(engine.reads_expected_tokens for engine in self.engines.values()):
                raise ValueError(
                    "engine.adaptive_tp.estimate ranked needs to be told how long each response is expected to be; "
                    "give rollout.lengths.type, such as history, or use survival (or bound)"
                )
            needing = {"policy": dispatch.plans}
            needing["order"] = self.rollout.order != "first_in"
            for key in (key for key, needs in needing.items() if needs):
                raise ValueError(
                    f"rollout.dispatch.{key} {getattr(dispatch, key)} needs to know how long responses will be; give "
                    "rollout.lengths.type, such as siblings"
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


def _with_threads(engine: EngineConfig, threads: int | None) -> EngineConfig:
    """The engine whose ranks share the threads of its process, where these are known and the ranks' are left open."""
    if not isinstance(engine, NativeEngineConfig) or engine.ranks == 1 or engine.threads_per_rank or threads is None:
        return engine
    return engine.model_copy(update={"threads_per_rank": max(1, threads // engine.ranks)})


def _beside_others(engine: EngineConfig, engines: int) -> EngineConfig:
    """The engine with the number of engines on its machine, where that is left open."""
    adaptive_tp = engine.adaptive_tp if isinstance(engine, NativeEngineConfig) else None
    if adaptive_tp is None or adaptive_tp.engines is not None:
        return engine
    return engine.model_copy(update={"adaptive_tp": adaptive_tp.model_copy(update={"engines": engines})})


def _placement(values: Mapping[str, Any]) -> Any:
    pipeline = values.get("pipeline")
    return pipeline.get("placement") if isinstance(pipeline, dict) else getattr(pipeline, "placement", None)
