"""What a recipe takes on the devices that it names, without a search: memory, and the seconds of a step.

    recipe, model, machine, prompts ─▶ memory of each worker, at its worst instant
                                    ─▶ bound of a step in which every response is the longest

The arithmetic is that of `candidates` and `bound`. Each worker has a device of its own, or its part of a CPU.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tailrace.algorithms.factory import make_algorithm
from tailrace.algorithms.table import Score
from tailrace.config.cluster import ROLLOUT, PoolConfig
from tailrace.config.hardware import DeviceConfig, DType
from tailrace.config.run import RunConfig
from tailrace.errors import PlanError
from tailrace.planner.bound import Bound, Flow, Generation, Parts, bound
from tailrace.planner.candidates import Training, training_of
from tailrace.planner.load import Load
from tailrace.planner.modes import Mode
from tailrace.planner.problem import Table
from tailrace.planning.allocation import Batches
from tailrace.planning.dispatch.costs import StepCosts
from tailrace.planning.engine_size import PROCESS_BYTES, EngineSize
from tailrace.planning.hardware.base import Link, Pool
from tailrace.planning.memory import Memory, engine_memory, in_turns, reference_memory, trainer_memory
from tailrace.planning.model_shape.base import ModelShape
from tailrace.planning.step_times.base import Additive, MixedStepTimes
from tailrace.planning.step_times.basis import Basis, Source
from tailrace.planning.step_times.generation import ELEMENT_BYTES, AnalyticStepTimes
from tailrace.planning.step_times.sources import source_of
from tailrace.planning.step_times.training import AnalyticTrainingTimes
from tailrace.planning.step_times.training_setup import Layout, MicroBatch, TrainingSetup
from tailrace.simulator.setup import install_s

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
class Prompts:
    """Tokens of the prompts to train on."""

    mean: float
    longest: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """Workers that are alike, and what each of their devices holds."""

    name: str
    count: int
    """Devices, or parts of the machine's memory."""
    memory: Memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What a recipe takes. Adapters are not known."""

    workers: tuple[Worker, ...]
    others: Mapping[str, float]
    """Bytes of the machine's memory beside those of workers, by purpose."""
    generation_s: float | None
    """Seconds of the generation of a step; None where an engine is not known."""
    training_s: float | None
    """Seconds of the update of a step; None where the trainer is not known."""
    bound: Bound | None
    """Of a whole step; None where something in it is not known."""
    basis: Basis
    """What the seconds rest on."""

    @property
    def total_bytes(self) -> float:
        """All workers' at their worst instants, and the others."""
        return sum(one.count * one.memory.peak for one in self.workers) + sum(self.others.values())


def outlook(
    config: RunConfig,
    shape: ModelShape,
    engines: Mapping[str, EngineSize | None],
    prompts: Prompts,
    machine: Machine,
    pools: Mapping[str, PoolConfig],
) -> Outlook:
    """Return what a recipe takes.

    `engines`: those of each rollout pool by its name; None where the size is unknown. `pools`: those of the run.
    """
    return _Looking(config, shape, engines, prompts, machine, pools).all()


class _Looking:
    def __init__(
        self,
        config: RunConfig,
        shape: ModelShape,
        engines: Mapping[str, EngineSize | None],
        prompts: Prompts,
        machine: Machine,
        pools: Mapping[str, PoolConfig],
    ) -> None:
        self._config, self._shape, self._machine, self._pools = config, shape, machine, pools
        self._separated = config.pipeline.placement == "separated"
        self._here = config.cluster.address is None
        self._counts = self._rollout_workers()
        self._sizes = {name: engines[name] for name in self._counts}
        self._load = _load(config, prompts)
        tasks = make_algorithm(config.resolved_algorithm).tasks
        self._scoring = {task.pool for task in tasks if task.work == Score()}
        self._setup = TrainingSetup(
            shape=shape,
            layout=Layout(checkpointing="full" if config.trainer.gradient_checkpointing else "none"),
            dtype="bfloat16" if config.trainer.precision == "bf16" else "float32",
        )

    def all(self) -> Outlook:
        training = self._training() if self._config.trainer.backend.type != "adapter" else None
        sources = {name: self._source(name, size) for name, size in self._sizes.items() if size and size.has_model}
        generation = self._generation(sources) if all(self._sizes.values()) else None
        whole = None if training is None or generation is None else self._bound(generation, training)
        spent = generation.generation_s if isinstance(generation, Flow) else generation
        return Outlook(
            workers=tuple(self._workers(training)),
            others=self._others(),
            generation_s=spent,
            training_s=None if training is None else training.seconds(streaming=self._config.pipeline.streaming),
            bound=whole,
            basis=next((source.basis for source in sources.values()), AnalyticStepTimes.basis),
        )

    def _rollout_workers(self) -> dict[str, int]:
        """The rollout workers of each pool that has some."""
        if not self._separated:
            return {ROLLOUT: 1}
        return {name: pool.workers for name, pool in self._config.cluster.rollout.each.items() if pool.workers}

    # seconds

    def _training(self) -> Training:
        batches = self._load.batches
        largest = min(batches.largest.tokens, batches.tokens)
        memory = trainer_memory(self._setup, MicroBatch(tokens=largest, squares=largest * batches.longest))
        pool = self._pool(self._part(self._config.cluster.trainer))
        mini = self._config.mini_batches_per_step
        return training_of(self._training_times(pool), self._setup.layout, pool, batches, memory, mini_batches=mini)

    def _training_times(self, pool: Pool) -> AnalyticTrainingTimes:
        """Rates that were measured are those that matrix products reached here: nothing is lost on top."""
        inefficiency = 1.0 if self._machine.is_measured else None
        return AnalyticTrainingTimes(self._setup, pool, inefficiency=inefficiency)

    def _source(self, name: str, size: EngineSize) -> Source:
        """The steps of a pool's engines."""
        compute = self._part(self._config.cluster.rollout.each[name])
        copies = size.dp * (sum(self._counts.values()) if self._here else 1)
        pool = self._pool(compute / size.ranks, 1 / (copies * size.tp), ranks=size.ranks)
        shape = _padded(self._shape, size.tp)
        if self._machine.is_measured or size.dtype != "bfloat16":
            return AnalyticStepTimes(shape, pool, dtype=size.dtype)
        return source_of(shape, pool, size.tp)

    def _generation(self, sources: Mapping[str, Source]) -> Flow | float:
        """Of a step, by the pool whose engines take the longest; all replicas have equal parts of it."""
        replicas = sum(count * self._size(name).dp for name, count in self._counts.items())
        ahead = self._config.pipeline.max_staleness if self._separated else 0
        each = [self._generated(name, sources.get(name, _NO_TIME), replicas, ahead) for name in self._counts]
        return max(each, key=lambda one: one.generation_s if isinstance(one, Flow) else one)

    def _generated(self, name: str, times: MixedStepTimes, replicas: int, ahead: int) -> Flow | float:
        size = self._size(name)
        room = float("inf")
        if size.cache_bytes is not None:
            room = size.cache_bytes / self._shape.cache_bytes(tp=size.tp, element_bytes=ELEMENT_BYTES[size.dtype])
        own = Generation(times, self._load, tp=size.tp, slots=size.slots, cache_tokens=room)
        return own.flow(replicas, ahead) if ahead else own.together_s(replicas)

    def _bound(self, generation: Flow | float, training: Training) -> Bound | None:
        try:
            table = Table.of(self._config)
        except PlanError:  # another model is trained, too, whose size is not known
            return None
        config = self._config
        parts = Parts(
            generation=generation,
            training_s=training.seconds(streaming=config.pipeline.streaming) - training.optimizer_s,
            claims=training.claims,
            optimizer_s=training.optimizer_s,
            reference_s=self._reference_s() if table.reference else 0.0,
            grading_s=0.0,
            grade_s=0.0,
            publish_s=0.0,
            arrive_s=0.0,
            install_s=max(self._install_s(size) for size in self._sizes.values() if size is not None),
        )
        return bound(Mode.of(config.pipeline), table, parts)

    def _install_s(self, size: EngineSize) -> float:
        return install_s(self._shape, self._pool(1.0), size.tp) if size.has_model else 0.0

    def _reference_s(self) -> float:
        batches = self._load.batches
        each = [self._pools[name] for name in self._scoring if name in self._pools] if self._separated else []
        workers = sum(pool.workers for pool in each) or 1
        times = self._training_times(self._pool(min((self._part(pool) for pool in each), default=1.0)))
        batch = MicroBatch(tokens=batches.tokens, squares=batches.tokens * batches.mean_length)
        return times.log_probs_s([batch]) / workers

    def _size(self, name: str) -> EngineSize:
        size = self._sizes[name]
        assert size is not None, "all are known"
        return size

    # the device of a worker

    def _part(self, pool: PoolConfig) -> float:
        """The part of a CPU's threads that a worker of `pool` has, with all that compute at the same time."""
        total = self._machine.threads
        if not self._separated or total is None:
            return 1.0
        threads = float(min(pool.threads_each, total))
        if self._here:
            rollout = list(self._config.cluster.rollout.each.values())
            both = [*rollout, self._config.cluster.trainer]
            beside = both if self._config.pipeline.max_staleness else rollout if pool in rollout else [pool]
            threads *= min(1.0, total / sum(each.workers * min(each.threads_each, total) for each in beside))
        return threads / total

    def _pool(self, compute: float, memory: float = 1.0, *, ranks: int = 1) -> Pool:
        """A worker's devices. `compute`, `memory`: the parts of a CPU's rates that each of them has."""
        machine, device = self._machine, self._machine.device
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

    # memory

    def _workers(self, training: Training | None) -> list[Worker]:
        parts: list[Worker] = []
        if training is not None:
            parts.append(Worker(name="trainer", count=1, memory=training.memory))
        for name, size in self._sizes.items():
            if size is not None and size.has_model:
                called = "engine" if name == ROLLOUT else f"engine of {name}"
                parts.append(Worker(name=called, count=self._counts[name] * size.ranks, memory=self._engine(size)))
        if self._scoring:
            tokens = self._load.batches.largest.tokens
            memory = reference_memory(self._setup, MicroBatch(tokens=tokens, squares=0.0))
            count = sum(self._pools[name].workers for name in self._scoring) if self._separated else 1
            parts.append(Worker(name="reference", count=count, memory=memory))
        if self._separated or not parts or any(part.count > 1 for part in parts):
            return parts
        together = in_turns({part.name: part.memory for part in parts})
        return [Worker(name=" and ".join(part.name for part in parts), count=1, memory=together)]

    def _engine(self, size: EngineSize) -> Memory:
        """Of a rank."""
        shape, element = _padded(self._shape, size.tp), ELEMENT_BYTES[size.dtype]
        load, batch = self._load, min(size.slots, self._load.samples)
        cached = (load.prompt + load.longest) * batch
        if size.cache_bytes is not None:
            cached = size.cache_bytes / shape.cache_bytes(tp=size.tp, element_bytes=element)
        return engine_memory(
            shape,
            tp=size.tp,
            cache_tokens=cached,
            step_tokens=max(batch, min(size.step_tokens or load.prompt, load.read)),
            batch_size=batch,
            staged_bytes=size.staged_bytes * shape.parameters / size.ranks,
            dtype=size.dtype,
        )

    def _others(self) -> dict[str, float]:
        """Processes, and weights on their way between them: a version in use and the next one."""
        processes = sum(self._counts[name] * size.processes for name, size in self._sizes.items() if size is not None)
        found: dict[str, float] = {}
        if self._separated:
            processes += sum(pool.workers for pool in self._pools.values())
            apart = not self._here or self._config.weights.medium not in ("auto", "shared_memory")
            holders = 1 + (sum(self._counts.values()) if apart else 0)  # others use the trainer's memory
            element = ELEMENT_BYTES[self._config.wire_dtype]
            found["published weights"] = 2.0 * holders * element * self._shape.parameters
        if processes:
            found["processes"] = float(processes * PROCESS_BYTES)
        return found


def _padded(shape: ModelShape, tp: int) -> ModelShape:
    """The model with as many heads as ranks can share."""
    return replace(shape, heads=-(-shape.heads // tp) * tp)


def _load(config: RunConfig, prompts: Prompts) -> Load:
    """A step in which every response is the longest."""
    groups, size, new = config.groups_per_step, config.algorithm.group_size, config.sampling.max_new_tokens
    tokens = groups * (prompts.mean + size * new)
    pairs = groups * (prompts.mean**2 + size * new * (2 * prompts.mean + new))
    return Load(
        groups=groups,
        group_size=size,
        prompt=prompts.mean,
        read=groups * prompts.mean,
        lengths=(new,),
        context=prompts.mean + new / 2,
        longest=new,
        tools_s=0.0,
        grading_s=0.0,
        grade_s=0.0,
        batches=Batches(
            tokens=tokens,
            mean_length=pairs / tokens,
            micro_batch_tokens=config.trainer.micro_batch_tokens,
            longest=prompts.longest + new,
        ),
    )
