"""The seconds of a recipe's step on the devices that it names, without a search, if every response is the longest.

The arithmetic is that of `candidates` and `bound`. Each worker has a device of its own, or its part of a CPU.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from tailrace.config.cluster import PoolConfig
from tailrace.config.hardware import DeviceConfig, DType
from tailrace.planner.bound import Bound, Flow, Generation, Parts, bound, together
from tailrace.planner.modes import Mode
from tailrace.planner.sized_run import SizedRun, padded
from tailrace.planner.trainings import Training, training_of
from tailrace.planning.dispatch.costs import StepCosts
from tailrace.planning.engine_size import EngineSize
from tailrace.planning.hardware.base import Link, Pool
from tailrace.planning.memory import trainer_memory
from tailrace.planning.step_times.base import Additive, MixedStepTimes
from tailrace.planning.step_times.basis import Basis, Source
from tailrace.planning.step_times.generation import ELEMENT_BYTES, AnalyticStepTimes
from tailrace.planning.step_times.sources import source_of
from tailrace.planning.step_times.training import AnalyticTrainingTimes
from tailrace.planning.step_times.training_setup import MicroBatch, TrainingSetup
from tailrace.simulator.setup import install_s, weights_bytes

_NO_TIME = Additive(StepCosts(base=0.0, each=0.0, context=0.0, prefill=0.0))
"""The steps of an engine without a model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The device that a run computes on, as far as this machine has it."""

    kind: str
    """A kind of the catalogue, or what it is called."""
    device: DeviceConfig
    threads: int | None = None
    """Of a CPU, which all workers on this machine share; None for devices of which each worker has its own."""
    is_measured: bool = False
    """Whether the rates are what was measured here, and not peaks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What a step takes. Adapters are not known."""

    generation_s: float | None
    """Seconds of the generation of a step; None where an engine is not known."""
    training_s: float | None
    """Seconds of the update of a step; None where the trainer is not known."""
    bound: Bound | None
    """Of a whole step; None where something in it is not known."""
    basis: Basis
    """What the seconds rest on."""


def outlook(run: SizedRun, machine: Machine) -> Outlook:
    """Return what a step takes on a machine."""
    return _Looking(run, machine).all()


@dataclass(frozen=True, slots=True)
class _Looking:
    run: SizedRun
    machine: Machine

    def all(self) -> Outlook:
        training = self._training() if self.run.has_known_trainer else None
        sources = {name: self._source(name, size) for name, size in self.run.sizes.items() if size and size.has_model}
        generation = self._generation(sources) if all(self.run.sizes.values()) else None
        whole = None if training is None or generation is None else self._bound(generation, training)
        spent = generation.generation_s if isinstance(generation, Flow) else generation
        return Outlook(
            generation_s=spent,
            training_s=None if training is None else training.seconds(streaming=self.run.config.pipeline.streaming),
            bound=whole,
            basis=next((source.basis for source in sources.values()), AnalyticStepTimes.basis),
        )

    def _training(self) -> Training:
        return self._trained(self.run.setup, self.run.config.cluster.trainer)

    def _trained(self, setup: TrainingSetup, compute: PoolConfig) -> Training:
        """The trainer of a model, in a worker of the pool `compute`."""
        run, pool = self.run, self._pool(self._part(compute))
        return training_of(
            self._training_times(setup, pool),
            setup.layout,
            pool,
            run.load.batches,
            trainer_memory(setup, run.load.batches.largest),
            mini_batches=run.config.mini_batches_per_step,
            epochs=run.config.trainer.epochs,
        )

    def _training_times(self, setup: TrainingSetup, pool: Pool) -> AnalyticTrainingTimes:
        """Rates that were measured are those that matrix products reached here: nothing is lost on top."""
        inefficiency = 1.0 if self.machine.is_measured else None
        return AnalyticTrainingTimes(setup, pool, inefficiency=inefficiency)

    def _source(self, name: str, size: EngineSize) -> Source:
        """The steps of a pool's engines."""
        compute = self._part(self.run.config.cluster.rollout.each[name])
        copies = size.dp * (sum(self.run.rollout_workers.values()) if self.run.here else 1)
        pool = self._pool(compute / size.ranks, 1 / (copies * size.tp), ranks=size.ranks)
        shape = padded(self.run.shape, size.tp)
        if self.machine.is_measured:
            return AnalyticStepTimes(shape, pool, dtype=size.dtype)
        return source_of(shape, pool, [size.tp], size.dtype)

    def _generation(self, sources: Mapping[str, Source]) -> Flow | float:
        """Of a step."""
        run = self.run
        ahead = run.config.pipeline.max_staleness if run.separated else 0
        each = [
            (self._generated(name, sources.get(name, _NO_TIME)), count * self._size(name).dp)
            for name, count in run.rollout_workers.items()
        ]
        return together(each, ahead)

    def _generated(self, name: str, times: MixedStepTimes) -> Generation:
        size = self._size(name)
        room = float("inf")
        if size.cache_bytes is not None:
            room = size.cache_bytes / self.run.shape.cache_bytes(tp=size.tp, element_bytes=ELEMENT_BYTES[size.dtype])
        return Generation(times, self.run.load, tp=size.tp, slots=size.slots, cache_tokens=room)

    def _bound(self, generation: Flow | float, training: Training) -> Bound | None:
        if (table := self.run.table) is None:
            return None
        values_s, critic_s = self._critic_s()
        config, weights = self.run.config, weights_bytes(self.run.config, self.run.shape)
        pool, apart = self._pool(1.0), self.run.separated and not self.run.here
        parts = Parts(
            generation=generation,
            training_s=training.seconds(streaming=config.pipeline.streaming) - training.optimizer_s,
            updates_s=training.updates_s,
            claims=training.claims,
            optimizer_s=training.optimizer_s,
            reference_s=self._reference_s() if table.reference else 0.0,
            values_s=values_s,
            critic_s=critic_s,
            grading_s=0.0,
            grade_s=0.0,
            publish_s=install_s(weights, pool, 1) if self.run.separated else 0.0,  # as long as the way back
            arrive_s=pool.network.seconds(weights) if apart else 0.0,  # on this machine, engines read what is published
            install_s=max(self._install_s(size) for size in self.run.sizes.values() if size is not None),
        )
        return bound(Mode.of(config.pipeline), table, parts)

    def _install_s(self, size: EngineSize) -> float:
        return (
            install_s(weights_bytes(self.run.config, self.run.shape), self._pool(1.0), size.tp)
            if size.has_model
            else 0.0
        )

    def _critic_s(self) -> tuple[float, float]:
        """Seconds of the values of a step, and of the critic's updates."""
        run = self.run
        if run.critic is None or run.table is None or run.table.critic is None:
            return 0.0, 0.0
        training = self._trained(run.critic, run.pools[run.table.critic.pool])
        return self._scores_s(run.critic, training.pool), training.seconds(streaming=run.config.pipeline.streaming)

    def _reference_s(self) -> float:
        run = self.run
        each = [run.pools[name] for name in run.scoring if name in run.pools] if run.separated else []
        workers = sum(pool.workers for pool in each) or 1
        pool = self._pool(min((self._part(pool) for pool in each), default=1.0))
        return self._scores_s(run.setup, pool) / workers

    def _scores_s(self, setup: TrainingSetup, pool: Pool) -> float:
        """Seconds in which a model scores all samples of a step."""
        batches = self.run.load.batches
        batch = MicroBatch(tokens=batches.tokens, squares=batches.tokens * batches.mean_length)
        return self._training_times(setup, pool).log_probs_s([batch])

    def _size(self, name: str) -> EngineSize:
        size = self.run.sizes[name]
        assert size is not None, "all are known"
        return size

    # the device of a worker

    def _part(self, pool: PoolConfig) -> float:
        """The part of a CPU's threads that a worker of `pool` has, with all that compute at the same time."""
        total = self.machine.threads
        if not self.run.separated or total is None:
            return 1.0
        threads = float(min(pool.threads_each, total))
        if self.run.here:
            rollout, training = list(self.run.config.cluster.rollout.each.values()), self._training_pools()
            same = [group for group in (rollout, training) if any(one is pool for one in group)]
            beside = [*rollout, *training] if self.run.config.pipeline.max_staleness else [*same, [pool]][0]
            threads *= min(1.0, total / sum(each.workers * min(each.threads_each, total) for each in beside))
        return threads / total

    def _training_pools(self) -> list[PoolConfig]:
        """Those of the models that are trained at the same time."""
        table = self.run.table
        critic = [] if table is None or table.critic is None else [self.run.pools[table.critic.pool]]
        return [self.run.config.cluster.trainer, *critic]

    def _pool(self, compute: float, memory: float = 1.0, *, ranks: int = 1) -> Pool:
        """A worker's devices. `compute`, `memory`: the parts of a CPU's rates that each of them has."""
        machine, device = self.machine, self.machine.device
        if machine.threads is not None:
            tflops: dict[DType, float] = {dtype: rate * compute for dtype, rate in device.tflops.items()}
            device = device.model_copy(update={"tflops": tflops, "memory_gb_s": device.memory_gb_s * memory})
        network = Link(bytes_per_s=device.network_gb_s * 1e9, latency_s=device.network_us * 1e-6)
        return Pool(
            name=machine.kind,
            kind=machine.kind,
            device=device,
            nodes=1,
            per_node=ranks,
            network=network,
            usd_per_hour=device.usd_per_hour,
        )
