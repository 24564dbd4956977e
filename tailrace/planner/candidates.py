"""All allocations that fit, each with the bound of its step: Algorithm 1 of StreamRL (section 4.2), for any pools.

    engines     every pool, number of devices and TP degree whose cache holds the longest sample
    trainer     every pool, number of devices, arrangement and size of micro-batches that fits; the quickest are kept
    reference   the fewest devices, of the trainer's pool, with which it is not what the step waits for
    separated   x + y ≤ n in one pool; x ≤ m and y ≤ n in two
    colocated   x = y, where the engine's cache has what the trainer leaves

In an asynchronous run, and in a streaming one, the step is about the longer of generation and training, as in the
paper. What is not known by arithmetic is left to the simulation.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from heapq import nsmallest
from itertools import islice, product

from tailrace.config.cluster import ROLLOUT
from tailrace.planner.bound import Bound, Flow, Generation, Parts, bound, together
from tailrace.planner.modes import Mode
from tailrace.planner.places import planned_places
from tailrace.planner.problem import Problem
from tailrace.planning.allocation import Allocation, Batches, Engines, layouts, tp_degrees
from tailrace.planning.hardware.base import Pool
from tailrace.planning.memory import Memory, reference_memory, trainer_memory
from tailrace.planning.packing import Lengths
from tailrace.planning.step_times.training import AnalyticTrainingTimes
from tailrace.planning.step_times.training_setup import Layout, MicroBatch
from tailrace.simulator.scenario import TrainerKind
from tailrace.simulator.setup import arrivals_s, engines_like, install_s, publish_s, weights_bytes
from tailrace.simulator.trainer import claim_of, update_s

MICRO_BATCH_TOKENS = (8192, 16_384, 32_768, 65_536)
"""Sizes of micro-batches to choose from."""
MOST_GRADERS = 1024
_KEPT = 2
"""Arrangements of a trainer that are kept for a number of devices and a way to claim."""
_KEPT_DEGREES = 2
"""TP degrees of engines that are kept for a number of devices."""
_PEAK = 4.0
"""How many times more responses than in the mean end at once, about, for which graders have to be there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A trainer, and the seconds of its step."""

    pool: Pool
    layout: Layout
    micro_batch_tokens: int
    memory: Memory
    whole_s: float
    """Of a step that it takes as a whole, without the optimizer."""
    streamed_s: float
    """The same in claims of a micro-batch for each rank: a pipeline is filled and emptied for each."""
    claims: float
    optimizer_s: float

    def seconds(self, *, streaming: bool) -> float:
        """Seconds of a step."""
        return (self.streamed_s if streaming else self.whole_s) + self.optimizer_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """An allocation that fits, in a mode."""

    mode: Mode
    allocation: Allocation
    micro_batch_tokens: int
    graders: int
    parts: Parts
    bound: Bound
    """Of the parts."""
    trainer: Memory

    @property
    def engines(self) -> Engines:
        """The engines of a plan, which has those of one kind."""
        (one,) = self.allocation.rollout
        return one


def sizes(pool: Pool, most: int) -> list[int]:
    """Numbers of devices of a pool to try: any in a node, then halves of nodes, about eight numbers for each doubling;
    and `most`."""
    found = set(range(1, 9)) | {number << exponent for exponent in range(most.bit_length()) for number in range(8, 16)}
    half = max(1, pool.per_node // 2)
    return sorted(size for size in found | {most} if size <= most and (size <= pool.per_node or size % half == 0))


class Candidates:
    """The candidates of a problem."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._weights = weights_bytes(problem.config, problem.shape)
        self._longest = problem.load.batches.longest
        self.engines = cache(self._engines)
        self.trainings = cache(self._trainings)
        self.degrees = cache(self._degrees)
        self._generated: dict[tuple[int, tuple[tuple[str, int, int, float, int], ...]], Flow | float] = {}
        self._arrivals: dict[tuple[str, int, tuple[tuple[str, int, int, int], ...]], float] = {}

    def of(self, mode: Mode) -> list[Candidate]:
        """Return all candidates of a mode."""
        return list(self._all(mode))

    def fits(self, mode: Mode) -> bool:
        """Whether a mode has any candidate."""
        return any(True for _ in self._all(mode))

    def _all(self, mode: Mode) -> Iterator[Candidate]:
        generating, training = planned_places(self._problem.cluster)
        if mode.colocated:
            for pool in generating:
                if pool in training:
                    yield from self._colocated(mode, pool)
            return
        for rollout, trainer in product(generating, training):
            yield from self._separated(mode, rollout, trainer)

    def with_devices(self, mode: Mode, pool: Pool, of_trainer: Pool, *, rollout: int, trainer: int) -> list[Candidate]:
        """The candidates of a mode that generate on so many devices and train on so many."""
        if mode.colocated:
            return list(self._shared(mode, pool, trainer))
        return [
            self._candidate(mode, engines, training, *reference)
            for training in self.quickest(of_trainer, trainer, streaming=mode.streaming)
            if (reference := self._reference(training)) is not None
            for engines in self._best_engines(mode, pool, rollout)
        ]

    def placed(self, mode: Mode, allocation: Allocation, micro_batch_tokens: int) -> Candidate | None:
        """An allocation in a mode; None where it does not fit, or the model has too few heads or layers for it."""
        shape, layout, (old,) = self._problem.shape, allocation.layout, allocation.rollout
        if shape.heads % old.tp or shape.heads % layout.tp or layout.pp > shape.layers:
            return None
        training = self.training(allocation.trainer, layout, micro_batch_tokens)
        engines = self._like(old.pool, engines=old.engines, tp=old.tp, dp=old.dp)
        if not training.memory.fits(allocation.trainer.device):
            return None
        if mode.colocated:
            return self._beside(mode, engines, training)
        engines, reference = replace(engines, cache_tokens=engines.room(shape)), self._reference(training)
        if reference is None or engines.cache_tokens < self._longest:
            return None
        return self._candidate(mode, engines, training, *reference)

    def of_allocation(self, mode: Mode, allocation: Allocation, micro_batch_tokens: int, graders: int) -> Candidate:
        """An allocation in a mode, whether it fits or not."""
        training = self.training(allocation.trainer, allocation.layout, micro_batch_tokens)
        reference_s = 0.0 if allocation.reference is None else self.reference_s(training, allocation.reference)
        parts = self.parts(mode, allocation.rollout, training, reference_s)
        parts = replace(parts, grading_s=self._problem.load.grading_s / graders)
        return Candidate(
            mode=mode,
            allocation=allocation,
            micro_batch_tokens=micro_batch_tokens,
            graders=graders,
            parts=parts,
            bound=bound(mode, self._problem.table, parts),
            trainer=training.memory,
        )

    def training(self, pool: Pool, layout: Layout, micro_batch_tokens: int) -> Training:
        """A trainer, whether it fits or not."""
        largest = replace(self._problem.load.batches, micro_batch_tokens=micro_batch_tokens).largest
        memory = trainer_memory(self._problem.setup(layout), largest)
        return self._training(layout, pool, micro_batch_tokens, memory)

    def _like(self, pool: Pool, *, tp: int, dp: int = 1, engines: int = 1) -> Engines:
        """Engines of the recipe, without a cache."""
        return engines_like(self._problem.config, ROLLOUT, pool, tp=tp, dp=dp, engines=engines)

    def _degrees(self, pool_name: str) -> list[int]:
        """TP degrees within a node under which an engine holds the longest sample."""
        shape, pool = self._problem.shape, self._problem.cluster.pool(pool_name)
        return [tp for tp in tp_degrees(shape, pool) if self._like(pool, tp=tp).room(shape) >= self._longest]

    def _engines(self, pool_name: str, devices: int) -> list[Engines]:
        """Engines on so many devices. An engine is as large as a node allows, so that few have to be fed."""
        pool = self._problem.cluster.pool(pool_name)
        found = []
        for tp in self.degrees(pool_name):
            if devices % tp == 0:
                replicas = devices // tp
                dp = math.gcd(replicas, pool.per_node // tp)
                one = self._like(pool, engines=replicas // dp, tp=tp, dp=dp)
                found.append(replace(one, cache_tokens=one.room(self._problem.shape)))
        return found

    def _trainings(self, pool_name: str, devices: int) -> list[Training]:
        """Trainers that fit on so many devices; those with layers' inputs on the host only where no other does."""
        pool = self._problem.cluster.pool(pool_name)
        each = list(self.layouts(pool, devices))
        if found := list(self._fitting(pool, each)):
            return found
        return list(self._fitting(pool, [replace(one, offload=True) for one in each if one.checkpointing == "full"]))

    def layouts(self, pool: Pool, devices: int) -> Iterator[Layout]:
        """The arrangements of a trainer on so many devices. Where the recipe says whether to recompute, only these."""
        trainer = self._problem.config.trainer
        is_free = "gradient_checkpointing" not in trainer.model_fields_set
        for layout in layouts(self._problem.shape, pool, devices):
            if is_free or trainer.gradient_checkpointing == (layout.checkpointing == "full"):
                yield layout

    def _fitting(self, pool: Pool, each: Iterable[Layout]) -> Iterator[Training]:
        batches = self._problem.load.batches
        for layout in each:
            setup = self._problem.setup(layout)
            for tokens in MICRO_BATCH_TOKENS:
                own = replace(batches, micro_batch_tokens=tokens)
                memory = trainer_memory(setup, own.largest)
                if not memory.fits(pool.device):
                    break  # larger ones take more
                yield self._training(layout, pool, tokens, memory)
                if batches.tokens / layout.dp <= tokens:
                    break  # all is in one

    def _training(self, layout: Layout, pool: Pool, tokens: int, memory: Memory) -> Training:
        return training_of(
            AnalyticTrainingTimes(self._problem.setup(layout), pool),
            layout,
            pool,
            replace(self._problem.load.batches, micro_batch_tokens=tokens),
            memory,
            mini_batches=self._problem.config.mini_batches_per_step,
            epochs=self._problem.config.trainer.epochs,
        )

    def played_s(self, training: Training, *, streaming: bool) -> float:
        """Seconds in which a trainer takes the drawn steps in claims and micro-batches of their own lengths.

        All samples are there when it begins, and each step is one mini-batch.
        """
        problem, layout = self._problem, training.layout
        times = AnalyticTrainingTimes(problem.setup(layout), training.pool)
        kind = TrainerKind(times=times, ranks=layout.dp, stages=layout.pp)
        tokens, each = training.micro_batch_tokens, problem.config.groups_per_step
        groups = [
            [Lengths(number, script.prompt_tokens, script.tokens) for script in group]
            for number, group in enumerate(problem.drawn.groups)
        ]
        seconds = 0.0
        for first in range(0, len(groups), each):
            claim, taken = claim_of(kind, tokens if streaming else None, each), list[Lengths]()
            for group in groups[first : first + each]:
                size = group[0].prompt_tokens + sum(one.response_tokens for one in group)
                if claim.is_complete or not claim.fits(size, 1):
                    seconds += update_s(kind, taken, tokens)
                    claim, taken = claim_of(kind, tokens if streaming else None, each), []
                claim.add(size, 1)
                taken += group
            seconds += update_s(kind, taken, tokens)
        return seconds + problem.steps * training.optimizer_s

    def quickest(self, pool: Pool, devices: int, *, streaming: bool) -> list[Training]:
        """The quickest trainers, and of a streaming one also those that end soon after the last response."""
        each = self.trainings(pool.name, devices)
        orders = [lambda one: one.seconds(streaming=streaming)]
        if streaming:
            orders.append(lambda one: one.seconds(streaming=True) + one.streamed_s / one.claims)
        found = [one for order in orders for one in nsmallest(_KEPT, each, key=order)]
        return list({id(one): one for one in found}.values())

    def _separated(self, mode: Mode, rollout: Pool, trainer: Pool) -> Iterator[Candidate]:
        for devices in sizes(trainer, trainer.devices):
            for training in self.quickest(trainer, devices, streaming=mode.streaming):
                if (found := self._reference(training)) is None:
                    continue
                reference, reference_s = found
                taken = devices + (reference.devices if reference else 0)
                left = rollout.devices - taken if rollout is trainer else rollout.devices
                if taken > trainer.devices or left < 1:
                    continue
                for size in sizes(rollout, left):
                    for engines in self._best_engines(mode, rollout, size):
                        yield self._candidate(mode, engines, training, reference, reference_s)

    def _best_engines(self, mode: Mode, pool: Pool, devices: int) -> list[Engines]:
        """The quickest few engines."""

        def seconds(one: Engines) -> float:
            found = self.generation((one,), mode)
            return found if isinstance(found, float) else max(found.generation_s, found.longest_s(found.generation_s))

        return sorted(self.engines(pool.name, devices), key=seconds)[:_KEPT_DEGREES]

    def _colocated(self, mode: Mode, pool: Pool) -> Iterator[Candidate]:
        for devices in sizes(pool, pool.devices):
            yield from self._shared(mode, pool, devices)

    def _shared(self, mode: Mode, pool: Pool, devices: int) -> Iterator[Candidate]:
        """Engines and a trainer that have the same devices."""
        each = sorted(self.trainings(pool.name, devices), key=lambda one: one.seconds(streaming=mode.streaming))
        for engines in self.engines(pool.name, devices):
            found = (self._beside(mode, engines, training) for training in each)
            yield from islice((one for one in found if one is not None), _KEPT)

    def _beside(self, mode: Mode, engines: Engines, training: Training) -> Candidate | None:
        """Engines, a trainer and a reference on the same devices; None where the longest sample has no room."""
        room, reference = self.room_beside(engines, training)
        if room < self._longest:
            return None
        reference_s = 0.0 if reference is None else self.reference_s(training, reference)
        return self._candidate(mode, replace(engines, cache_tokens=room), training, reference, reference_s)

    def room_beside(self, engines: Engines, training: Training) -> tuple[float, Layout | None]:
        """Tokens in the cache of an engine that shares its devices with a trainer, and with a reference, of which the
        arrangement is returned, too; none leaves its memory.

        The reference has the least TP degree with which the longest sample has room.
        """
        shape, pool, devices = self._problem.shape, engines.pool, training.layout.devices
        if not self._problem.table.reference:
            return engines.room(shape, taken_bytes=training.memory.peak), None
        room, layout = 0.0, Layout()
        for tp in tp_degrees(shape, pool):
            if devices % tp == 0:
                layout = Layout(tp=tp, dp=devices // tp)
                setup = self._problem.setup(layout)
                weights = setup.element_bytes * setup.parameters
                room = engines.room(shape, taken_bytes=training.memory.peak + weights)
                if room >= self._longest:
                    break
        return room, layout

    def _reference(self, training: Training) -> tuple[Layout | None, float] | None:
        """The reference's arrangement, where the algorithm has one, and its seconds of a step.

        There are as many replicas as keep it below the trainer. None where it fits nowhere in a node.
        """
        if not self._problem.table.reference:
            return None, 0.0
        each = self.reference_layouts(training.pool, training.micro_batch_tokens)
        layout = next((one for one, memory in each if memory.fits(training.pool.device)), None)
        if layout is None:
            return None
        one_s = self.reference_s(training, layout)
        layout = replace(layout, dp=math.ceil(one_s / training.whole_s))
        return layout, one_s / layout.dp

    def reference_layouts(self, pool: Pool, micro_batch_tokens: int) -> list[tuple[Layout, Memory]]:
        """The arrangements of a replica of the reference on a pool with their memory, from few devices to many."""
        largest = replace(self._problem.load.batches, micro_batch_tokens=micro_batch_tokens).largest
        each = [Layout(tp=tp) for tp in tp_degrees(self._problem.shape, pool)]
        return [(layout, reference_memory(self._problem.setup(layout), largest)) for layout in each]

    def reference_s(self, training: Training, layout: Layout) -> float:
        """Seconds of a step of a reference on devices of the trainer's pool, whose replicas share what there is."""
        batches, tokens = self._problem.load.batches, float(training.micro_batch_tokens)
        setup = self._problem.setup(replace(layout, dp=1))
        batch = MicroBatch(tokens=tokens, squares=tokens * batches.mean_length)
        one_s = AnalyticTrainingTimes(setup, training.pool).log_probs_s([batch]) * batches.tokens / tokens
        return one_s / layout.dp

    def generation(self, rollout: tuple[Engines, ...], mode: Mode) -> Flow | float:
        """A step's generation; see `Parts`."""
        problem, ahead = self._problem, 0 if mode.colocated else mode.max_staleness
        key = (
            ahead,
            tuple((one.pool.name, one.tp, one.slots, one.cache_tokens, one.engines * one.dp) for one in rollout),
        )
        if (found := self._generated.get(key)) is None:
            each = [
                Generation(
                    problem.source(one),
                    problem.load,
                    tp=one.tp,
                    slots=one.slots,
                    cache_tokens=one.cache_tokens,
                )
                for one in rollout
            ]
            counts = (one.engines * one.dp for one in rollout)
            self._generated[key] = found = together(list(zip(each, counts, strict=True)), ahead)
        return found

    def parts(self, mode: Mode, rollout: tuple[Engines, ...], training: Training, reference_s: float) -> Parts:
        """The parts of a step, without gradings."""
        problem = self._problem
        return Parts(
            generation=self.generation(rollout, mode),
            training_s=training.seconds(streaming=mode.streaming) - training.optimizer_s,
            claims=training.claims,
            optimizer_s=training.optimizer_s,
            reference_s=reference_s,
            grading_s=0.0,
            grade_s=problem.load.grade_s,
            publish_s=publish_s(self._weights, training.pool, training.layout),
            arrive_s=0.0 if mode.colocated else self._arrive_s(rollout, training),
            install_s=max(install_s(self._weights, one.pool, one.tp) for one in rollout),
        )

    def _candidate(
        self, mode: Mode, engines: Engines, training: Training, reference: Layout | None, reference_s: float
    ) -> Candidate:
        problem, load, rollout = self._problem, self._problem.load, (engines,)
        parts = self.parts(mode, rollout, training, reference_s)
        graders = problem.config.rewards.least_places
        found = bound(mode, problem.table, parts)
        if load.grading_s:
            graders = min(MOST_GRADERS, max(1, math.ceil(_PEAK * load.grading_s / found.seconds)))
            parts = replace(parts, grading_s=load.grading_s / graders)
            found = bound(mode, problem.table, parts)
        return Candidate(
            mode=mode,
            allocation=Allocation(
                rollout=rollout,
                trainer=training.pool,
                layout=training.layout,
                reference=reference,
                colocated=mode.colocated,
            ),
            micro_batch_tokens=training.micro_batch_tokens,
            graders=graders,
            parts=parts,
            bound=found,
            trainer=training.memory,
        )

    def _arrive_s(self, rollout: tuple[Engines, ...], training: Training) -> float:
        """Seconds until the last engine has new weights."""
        each = tuple((one.pool.name, one.most_engines, one.tp, one.dp) for one in rollout)
        key = training.pool.name, training.layout.devices, each
        if (found := self._arrivals.get(key)) is None:
            allocation = Allocation(rollout=rollout, trainer=training.pool, layout=training.layout)
            found = max(arrivals_s(self._problem.cluster, allocation, self._weights))
            self._arrivals[key] = found
        return found


def training_of(
    times: AnalyticTrainingTimes,
    layout: Layout,
    pool: Pool,
    batches: Batches,
    memory: Memory,
    *,
    mini_batches: int,
    epochs: int,
) -> Training:
    """Return a trainer with the seconds of its step, which goes so often through so many mini-batches."""
    updates = mini_batches * epochs
    own = batches.tokens / layout.dp / mini_batches
    count = max(1, math.ceil(own / batches.micro_batch_tokens))
    batch = MicroBatch(tokens=own / count, squares=own / count * batches.mean_length)
    optimizer_s = times.optimizer_s()
    stage_s = (times.step_s([batch]) - optimizer_s) / layout.pp
    score_s = times.log_probs_s([batch]) if updates > 1 else 0.0
    whole_s = updates * (count + layout.pp - 1) * stage_s + mini_batches * count * score_s
    return Training(
        pool=pool,
        layout=layout,
        micro_batch_tokens=batches.micro_batch_tokens,
        memory=memory,
        whole_s=whole_s,
        streamed_s=count * layout.pp * stage_s if updates == 1 else whole_s,
        claims=float(count),
        optimizer_s=updates * optimizer_s,
    )
