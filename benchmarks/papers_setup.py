"""What the set-ups of all papers share: constants, lengths, step times, trainers, and systems that are simulated.

No constant belongs to one row or one paper. What a paper does not say about its set-up stands in its own file.
"""

import csv
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from scipy.optimize import brentq

from tailrace.config.rollout import DispatchConfig, Policy
from tailrace.config.weights import WeightsMode
from tailrace.errors import PlanError
from tailrace.planning.allocation import Allocation, Batches, Engines, engine_tokens, layouts, mean_batches
from tailrace.planning.curves import Surface
from tailrace.planning.drain import drain_s
from tailrace.planning.hardware.base import Cluster, Link, Pool
from tailrace.planning.hardware.catalogue import find_device
from tailrace.planning.memory import trainer_memory
from tailrace.planning.model_shape.base import ModelShape
from tailrace.planning.model_shape.catalogue import find_shape
from tailrace.planning.packing import GroupPart
from tailrace.planning.step_times.base import MixedStepTimes
from tailrace.planning.step_times.collectives import Group, all_gather_s
from tailrace.planning.step_times.generation import AnalyticStepTimes
from tailrace.planning.step_times.operators import Pass
from tailrace.planning.step_times.rates import HOSTS, NO_HOST, Host
from tailrace.planning.step_times.training import INEFFICIENCY, TYPICAL_INEFFICIENCY, AnalyticTrainingTimes
from tailrace.planning.step_times.training_setup import Layout, MicroBatch, TrainingSetup
from tailrace.simulator.run import SimulatedRun
from tailrace.simulator.scenario import EngineKind, Scenario, TrainerKind
from tailrace.simulator.setup import arrivals_s
from tailrace.simulator.summary import Summary, Summing
from tailrace.types import IntArray
from tailrace.workloads.importers.servegen import ServeGen
from tailrace.workloads.replay import Replay, Script, Turn
from tailrace.workloads.trace import Provenance

SLOTS = 256
"""The most sequences that a replica decodes together."""
STEP_TOKENS = 8192
"""Tokens of prompts in a step of an engine."""
MICRO_BATCH_TOKENS = 16_384
"""Tokens that a rank of a trainer computes at once."""
PARTS = 8
"""Parts in which a streaming trainer takes a step's samples; each has a micro-batch for each rank at least."""
STEPS, WARM_UP = 3, 1
"""Training steps that are simulated, and those of them that do not count."""
DEGREES = (1, 2, 4, 8)
"""TP degrees of engines that are tried."""
SERVER: Host = HOSTS["vllm"]
"""What vLLM's host takes of a step, as fitted to published measurements of serving (benchmarks/simulator_tpot.py)."""
MEGATRON = 1.6
"""How many times longer than at its rates a Megatron trainer takes: the most that NeMo-RL's published steps allow
(benchmarks/megatron_fit.py). An FSDP trainer takes as long as those of prime-rl, which the planner rests on."""
TRAINED_BYTES = 16
"""Bytes of a parameter that a trainer keeps: fp32 weight, gradient and two moments."""
SERVED_BYTES = 2
"""Bytes of a parameter that an engine keeps."""
SERVICE_LIMIT = 32_768
"""The most tokens of a response that the service of DeepSeek-R1 gave."""
SPLITS = 16
"""Parts into which devices are cut where a split is searched."""
OVERLAP = 0.7
"""No asynchronous step takes less than this part of the time in which its samples are generated, for the search."""
PROCESSES = 2
"""That simulate at the same time."""
SEED = 0

Setting = TypeVar("Setting")
Found = TypeVar("Found")

_SIZES = tuple(2**exponent for exponent in range(9))
_CONTEXTS = (1, 512, 2048, 8192, 32768)


@dataclass(frozen=True, slots=True)
class Published:
    """The rows of papers.csv of one paper."""

    rows: Sequence[Mapping[str, str]]

    @classmethod
    def read(cls, file: Path, paper: str) -> "Published":
        """Read those of a paper."""
        with file.open(encoding="utf-8", newline="") as lines:
            return cls([row for row in csv.DictReader(lines) if row["paper"] == paper])

    def value(self, quantity: str, **fields: str) -> float:
        """The value of the one row with a quantity, and with other fields that begin so."""
        found = [
            row
            for row in self.rows
            if row["quantity"] == quantity and all(row[name].startswith(text) for name, text in fields.items())
        ]
        if len(found) != 1:
            raise LookupError(f"papers.csv has {len(found)} rows of {quantity!r} with {fields}; expected one")
        return float(found[0]["value"])


class Tabulated:
    """Analytic steps that are put into grids once for each TP degree, but for those that also compute prompts."""

    def __init__(self, source: AnalyticStepTimes) -> None:
        self._source = source
        self._decode = cache(lambda tp: _surface(lambda size, each: source.step_s(tp, size, size * each, 1), _total))
        self._prefill = cache(lambda tp: _surface(lambda size, each: source.prefill_s(tp, size, each), _each))

    def step_s(
        self, tp: int, batch_size: float, context_tokens: float, replicas: int, others: float | None = None
    ) -> float:
        """See `StepTimes`."""
        return self._decode(tp).at(batch_size, context_tokens)

    def prefill_s(self, tp: int, batch_size: float, rms_length: float) -> float:
        """See `StepTimes`."""
        return self._prefill(tp).at(batch_size, rms_length)

    def mixed_s(self, tp: int, batch_size: float, context_tokens: float, chunk: Pass) -> float:
        """See `MixedStepTimes`."""
        return self._source.mixed_s(tp, batch_size, context_tokens, chunk)


def _surface(seconds: Callable[[int, int], float], x: Callable[[int, int], float]) -> Surface:
    return Surface.through({size: [(x(size, each), seconds(size, each)) for each in _CONTEXTS] for size in _SIZES})


def _total(size: int, each: int) -> float:
    return size * each


def _each(size: int, each: int) -> float:
    return each


_TABULATED: dict[tuple[str, str, Host], MixedStepTimes] = {}


def step_times(shape: ModelShape, pool: Pool, host: Host = NO_HOST) -> MixedStepTimes:
    """The steps of engines, which are tabulated once."""
    key = shape.name, pool.kind, host
    if key not in _TABULATED:
        _TABULATED[key] = Tabulated(AnalyticStepTimes(shape, pool, host=host))
    return _TABULATED[key]


def pool_of(kind: str, devices: int, *, network: float | None = None, place: str = "", node: int | None = None) -> Pool:
    """So many devices of a kind. `network`: bytes a second from a device to other nodes, by default the kind's."""
    name, device = find_device(kind)
    per_node = min(devices, device.devices_per_node if node is None else node)
    return Pool(
        name=name,
        kind=name,
        device=device,
        nodes=devices // per_node,
        per_node=per_node,
        datacentre=place,
        network=Link(
            bytes_per_s=device.network_gb_s * 1e9 if network is None else network, latency_s=device.network_us * 1e-6
        ),
        usd_per_hour=device.usd_per_hour,
    )


def part_of(pool: Pool, devices: int) -> Pool:
    """The nodes of a pool that its first devices are on."""
    per_node = min(devices, pool.per_node)
    return replace(pool, nodes=-(-devices // per_node), per_node=per_node)


def replay_of(lengths: IntArray, *, prompt: int, group_size: int) -> Replay:
    """Groups of responses of these lengths, in their order."""
    scripts = [Script(prompt_tokens=prompt, turns=(Turn(generated_tokens=int(tokens)),)) for tokens in lengths]
    return Replay([scripts[first : first + group_size] for first in range(0, len(scripts), group_size)])


def lognormal(median: float, deviation: float, *, most: int, count: int) -> IntArray:
    """[count] lengths that are cut at `most`."""
    drawn = median * np.exp(deviation * np.random.default_rng(SEED).standard_normal(count))
    lengths: IntArray = np.clip(np.rint(drawn), 1, most).astype(np.int64)
    return lengths


def reasoning(folder: Path, *, most: int, count: int) -> IntArray:
    """[count] lengths of DeepSeek-R1's responses to short prompts, scaled so that the service's limit becomes `most`.

    `folder`: TAILRACE_DATA.
    """
    client = folder / "lengths" / "servegen_deepseek_r1" / "chunk-66"
    files = [client.with_name(f"{client.name}{end}") for end in ("-trace.csv", "-dataset.json")]
    trace = ServeGen().read(files, Provenance(source="ServeGen, client 66"))
    drawn = np.random.default_rng(SEED).choice(trace.samples["response_tokens"].to_numpy(), count)
    lengths: IntArray = np.clip(np.rint(drawn * most / SERVICE_LIMIT), 1, most).astype(np.int64)
    return lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """What the devices of a trainer do for each sample, model after model; all models are of one shape."""

    trained: int
    """Models that are trained: the actor, and in PPO the critic."""
    scored: int
    """Forward passes besides: of a reference, of a critic and of the actor before their updates."""


PPO = Algorithm(trained=2, scored=2)
"""With one update a step, the update itself has the actor's log-probabilities."""
PPO_OF_VERL = Algorithm(trained=2, scored=3)
"""verl computes these before, in any case."""
GRPO = Algorithm(trained=1, scored=2)
DAPO = Algorithm(trained=1, scored=1)
"""Without a reference."""


class Models:
    """The times of several models that share a trainer's devices in turns; see `TrainerTimes`."""

    def __init__(self, times: AnalyticTrainingTimes, layout: Layout, algorithm: Algorithm, batches: Batches) -> None:
        """`batches`: what a training step has in the mean."""
        self._times, self._layout, self._algorithm = times, layout, algorithm
        mean = batches.micro_batches(layout.dp)
        self._first_s = self._all_s(mean[:1])
        self._each_s = self._all_s(mean[:1] * 2) - self._first_s
        self._count = len(mean)

    def update_s(self, micro_batch: Sequence[GroupPart]) -> float:
        """See `TrainerTimes`: all models, one after the other."""
        update_s = self._times.update_s(micro_batch)
        return self._algorithm.trained * update_s + self._algorithm.scored * self.score_s(micro_batch)

    def score_s(self, micro_batch: Sequence[GroupPart]) -> float:
        """See `TrainerTimes`. Stages work on different micro-batches."""
        return self._times.score_s(micro_batch)

    def optimizer_s(self) -> float:
        """Seconds of the optimizer steps of all trained models, and in which stages wait for each other."""
        fill_s = (self._layout.pp - 1) * self._each_s
        return self._algorithm.trained * self._times.optimizer_s() + fill_s

    def step_s(self) -> float:
        """Seconds of a training step, whose samples are there."""
        return self._first_s + (self._count - 1) * self._each_s

    def _all_s(self, batches: Sequence[MicroBatch]) -> float:
        algorithm = self._algorithm
        return algorithm.trained * self._times.step_s(batches) + algorithm.scored * self._times.log_probs_s(batches)


@dataclass(frozen=True, eq=False, kw_only=True)
class Task:
    """What is trained: a model, an algorithm, and a batch of a workload."""

    shape: ModelShape
    algorithm: Algorithm
    replay: Replay
    groups: int
    """Prompts of a training step."""
    trainers: dict[tuple[Any, ...], tuple[Models, Layout]] = field(default_factory=dict)
    """Those that were searched before, by pool, devices and kind."""
    generations: dict[tuple[Any, ...], tuple[float, EngineKind]] = field(default_factory=dict)
    """See `generation_s`; by pool, devices and host."""

    @property
    def group_size(self) -> int:
        """Samples of a prompt."""
        return len(self.replay.groups[0])

    @property
    def weights(self) -> float:
        """Bytes of the weights that engines get."""
        return SERVED_BYTES * self.shape.parameters

    @cached_property
    def batches(self) -> Batches:
        """What a training step has in the mean."""
        groups = [(group[0].prompt_tokens, [script.tokens for script in group]) for group in self.replay.groups]
        return mean_batches(groups, groups_per_step=self.groups, micro_batch_tokens=MICRO_BATCH_TOKENS)


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """How a system runs: what distinguishes the baselines of a paper from each other."""

    slots: int = SLOTS
    """The most sequences that a replica decodes together."""

    placement: Literal["colocated", "separated"] = "separated"
    streaming: bool = False
    max_staleness: int = 0
    policy: Policy = "round_robin"
    expectation_error: float = 0.0
    """See `Scenario`; where the policy needs no lengths, it knows none."""
    weights: WeightsMode = "synchronous"
    host: Host = NO_HOST
    """What an engine's host takes of a step."""
    trainer: Literal["megatron", "fsdp"] = "megatron"
    """Its trainer: one with TP, PP and DP, whose DP ranks share out the moments, or one that shards all and has DP."""
    inefficiency: float = MEGATRON
    """Of a Megatron trainer."""
    slower: float = 1.0
    """How many times longer an FSDP trainer takes than those of prime-rl."""

    @property
    def knows(self) -> bool:
        """Whether it expects lengths."""
        return self.policy in ("streamrl", "skewness_aware")

    @property
    def ahead(self) -> "System":
        """The same one step ahead, with weights that arrive meanwhile and are taken between two batches."""
        return replace(self, streaming=True, max_staleness=1, weights="delayed")


def trainer_of(task: Task, pool: Pool, devices: int, system: System) -> tuple[Models, Layout]:
    """The quickest arrangement of a trainer on the first devices of a pool.

    Raises:
        PlanError: none fits.
    """
    key = pool.kind, devices, system.trainer, system.inefficiency, system.slower
    if key not in task.trainers:
        task.trainers[key] = _trainer_of(task, part_of(pool, devices), devices, system)
    return task.trainers[key]


def _trainer_of(task: Task, pool: Pool, devices: int, system: System) -> tuple[Models, Layout]:
    found = []
    for layout in layouts(task.shape, pool, devices):
        setup = TrainingSetup(shape=task.shape, layout=layout)
        shards = layout.sharding == "full"
        known = shards and layout.tp == layout.pp == 1 if system.trainer == "fsdp" else not shards
        if known and trainer_memory(setup, task.batches.largest).fits(pool.device):
            typical = system.slower * INEFFICIENCY.get(pool.kind, TYPICAL_INEFFICIENCY)
            inefficiency = system.inefficiency if system.trainer == "megatron" else typical
            times = AnalyticTrainingTimes(setup, pool, inefficiency=inefficiency)
            found.append((Models(times, layout, task.algorithm, task.batches), layout))
    if not found:
        raise PlanError(f"a trainer of {task.shape.name} does not fit on {devices} {pool.kind}")
    return min(found, key=lambda each: each[0].step_s())


def engines_of(task: Task, pool: Pool, devices: int, tp: int, system: System) -> EngineKind | None:
    """The engines on so many devices of a pool; None where the longest response does not fit."""
    if task.shape.heads % tp or devices < tp or tp > pool.per_node:
        return None
    room = engine_tokens(task.shape, pool, tp=tp, step_tokens=STEP_TOKENS, slots=system.slots)
    if room < task.batches.longest:
        return None
    return EngineKind(
        engines=devices // tp,
        times=step_times(task.shape, pool, system.host),
        tp=tp,
        slots=system.slots,
        cache_tokens=room,
        prefill_tokens=STEP_TOKENS,
        block=16,
        install_s=task.weights / tp / (pool.device.host_gb_s * 1e9),
    )


def task_of(
    model: str, algorithm: Algorithm, lengths: IntArray, *, groups: int, group_size: int = 1, prompt: int
) -> Task:
    """What is trained: a model on steps of so many prompts, whose responses have these lengths in their order."""
    replay = replay_of(lengths, prompt=prompt, group_size=group_size)
    return Task(shape=find_shape(model), algorithm=algorithm, replay=replay, groups=groups)


def side_by_side(measure: Callable[[Setting], Found], settings: Iterable[Setting]) -> list[Found]:
    """What is found in each setting, in their order."""
    with ProcessPoolExecutor(PROCESSES) as processes:
        return list(processes.map(measure, settings))


class Free:
    """A trainer that takes no time."""

    def update_s(self, micro_batch: Sequence[GroupPart]) -> float:
        """See `TrainerTimes`."""
        return 0.0

    def score_s(self, micro_batch: Sequence[GroupPart]) -> float:
        """See `TrainerTimes`."""
        return 0.0

    def optimizer_s(self) -> float:
        """See `TrainerTimes`."""
        return 0.0


def simulated(scenario: Scenario, replay: Replay, *, warm_up: int = WARM_UP) -> Summary:
    """Run a scenario."""
    summing = Summing(warm_up)
    run = SimulatedRun(scenario, replay, sinks=(summing,), samples=False)
    run.run()
    return summing.summary(preemptions=sum(engine.preemptions for engine in run.engines))


def generation_s(task: Task, pool: Pool, devices: int, system: System) -> tuple[float, EngineKind]:
    """Seconds in which a step's samples are generated, placed in turn, under the best TP degree, and such engines.

    Raises:
        PlanError: a response fits under no degree.
    """
    key = pool.kind, devices, system.host, system.slots
    if key not in task.generations:
        kinds = [engines_of(task, pool, devices, tp, system) for tp in DEGREES]
        fitting = [kind for kind in kinds if kind is not None]
        if not fitting:
            raise PlanError(f"{task.shape.name} does not fit on {devices} {pool.kind}")
        best = min(fitting, key=lambda kind: _one_engine_s(task, kind))
        scenario = _scenario(task, replace(system, policy="round_robin"), best, TrainerKind(times=Free()))
        task.generations[key] = simulated(replace(scenario, steps=1), task.replay, warm_up=0).step_s, best
    return task.generations[key]


def _one_engine_s(task: Task, kind: EngineKind) -> float:
    """Seconds in which the engine with the longest response generates its part of a step's samples."""
    scripts = [script for group in task.replay.groups[: task.groups] for script in group]
    longest = max(range(len(scripts)), key=lambda place: scripts[place].tokens)
    works = [(script.prompt_tokens, script.tokens) for script in scripts[longest % kind.engines :: kind.engines]]
    held = statistics.fmean(prompt + tokens for prompt, tokens in works)
    return drain_s(kind.times, kind.tp, [works], (), slots=max(1, min(kind.slots, int(kind.cache_tokens / held))))


def _scenario(task: Task, system: System, engines: EngineKind, trainer: TrainerKind) -> Scenario:
    part = task.batches.tokens / trainer.ranks / PARTS
    return Scenario(
        steps=STEPS,
        groups_per_step=task.groups,
        group_size=task.group_size,
        micro_batch_tokens=round(max(MICRO_BATCH_TOKENS, part)) if system.streaming else MICRO_BATCH_TOKENS,
        placement=system.placement,
        max_staleness=system.max_staleness,
        streaming=system.streaming,
        weights=system.weights,
        dispatch=DispatchConfig(policy=system.policy),
        order="longest_first" if system.knows else "first_in",
        knows_lengths="lengths" if system.knows else "nothing",
        expectation_error=system.expectation_error if system.knows else 0.0,
        engines=(engines,),
        trainer=trainer,
        graders=task.groups * task.group_size,
        moves=False,
        seed=SEED,
    )


def colocated(task: Task, pool: Pool, system: System) -> Scenario:
    """A system whose engines and trainer have the same devices in turns."""
    _, engines = generation_s(task, pool, pool.devices, system)
    models, layout = trainer_of(task, pool, pool.devices, system)
    kind = TrainerKind(times=models, ranks=layout.dp, publish_s=offloading_s(task, pool))
    return _scenario(task, system, engines, kind)


def offloading_s(task: Task, pool: Pool) -> float:
    """Seconds of a step in which devices change between generation and training.

    What the trainer keeps of each trained model goes to the host's memory and comes back, and the new weights are
    gathered for the engines.
    """
    moved = 2 * TRAINED_BYTES * task.shape.parameters * task.algorithm.trained / pool.devices
    return moved / (pool.device.host_gb_s * 1e9) + all_gather_s(task.weights, Group.of(pool, pool.devices))


def separated(
    task: Task, system: System, rollout: Pool, trainer: Pool, *, generate: int, train: int, wide: Link | None = None
) -> Scenario:
    """A system with devices for each stage. `wide`: the link between the two pools, where they are far apart."""
    _, engines = generation_s(task, rollout, generate, system)
    models, layout = trainer_of(task, trainer, train, system)
    ends = frozenset((rollout.datacentre, trainer.datacentre))
    cluster = Cluster(pools=(rollout, trainer), wide={} if wide is None else {ends: wide})
    members = Engines(
        pool=rollout,
        engines=engines.engines,
        tp=engines.tp,
        slots=engines.slots,
        cache_tokens=engines.cache_tokens,
    )
    allocation = Allocation(rollout=(members,), trainer=trainer, layout=layout)
    arrive_s = max(arrivals_s(cluster, allocation, task.weights))
    gathered = all_gather_s(task.weights, Group.of(trainer, layout.devices))
    kind = TrainerKind(times=models, ranks=layout.dp, publish_s=gathered)
    return _scenario(task, system, replace(engines, arrive_s=arrive_s), kind)


def best_split(task: Task, system: System, pool: Pool) -> tuple[int, Summary]:
    """The devices that generate, where the others train, under which a step is the quickest; and the run.

    The search places samples in turn, which takes less time than to plan, and the run as the system does.

    Raises:
        PlanError: the model fits on no split.
    """
    plain = replace(system, policy="round_robin")
    best: tuple[float, int] | None = None
    for least, generate in sorted(_splits(task, plain, pool)):
        if best is None or least < best[0]:
            found = simulated(split_of(task, plain, pool, generate), task.replay).step_s, generate
            best = found if best is None else min(best, found)
    if best is None:
        raise PlanError(f"{task.shape.name} fits on no split of {pool.devices} {pool.kind}")
    return best[1], simulated(split_of(task, system, pool, best[1]), task.replay)


def _splits(task: Task, system: System, pool: Pool) -> Iterator[tuple[float, int]]:
    """Yield the least seconds that a step can take under each split, and the devices that generate."""
    for generate in range(pool.devices // SPLITS, pool.devices, pool.devices // SPLITS):
        with suppress(PlanError):
            generation, _ = generation_s(task, pool, generate, system)
            models, _ = trainer_of(task, pool, pool.devices - generate, system)
            yield max(OVERLAP * generation, models.step_s()), generate


def split_of(task: Task, system: System, pool: Pool, generate: int) -> Scenario:
    """A system of which so many devices generate, and the others train."""
    return separated(task, system, pool, pool, generate=generate, train=pool.devices - generate)


def expectation_error(recall: float, share: float) -> float:
    """The error of expected lengths, as a multiple of the deviation of log-lengths, under which so many of the longest
    `share` are among those that are expected to be."""
    random = np.random.default_rng(SEED)
    truth, noise = random.standard_normal(100_000), random.standard_normal(100_000)
    longest = truth >= np.quantile(truth, 1 - share)

    def missing(error: float) -> float:
        told = truth + error * noise
        return float(recall - (longest & (told >= np.quantile(told, 1 - share))).sum() / longest.sum())

    return float(brentq(missing, 0.0, 5.0))
