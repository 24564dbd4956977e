"""All allocations that fit, each with the bound of its step: Algorithm 1 of StreamRL (section 4.2), for any pools.

    engines     every pool, number of devices and TP degree whose cache holds the longest sample
    trainer     every pool, number of devices, arrangement and size of micro-batches that fits; the quickest are kept
    reference   the fewest devices, of the trainer's pool, with which it is not what the step waits for
    critic      the same: so that its updates take no longer than the trainer's, without its values or with them
    separated   x + y ≤ n in one pool; x ≤ m and y ≤ n in two
    colocated   x = y, where the engine's cache has what the trainer leaves; a critic is arranged like the trainer

In an asynchronous run, and in a streaming one, the step is about the longer of generation and training, as in the
paper. What is not known by arithmetic is left to the simulation.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice, product

from tailrace.config.cluster import ROLLOUT
from tailrace.planner.bound import Bound, Flow, Generation, Parts, bound, together
from tailrace.planner.modes import Mode
from tailrace.planner.places import planned_places
from tailrace.planner.problem import Problem
from tailrace.planner.trainings import KEPT, Training, Trainings, sizes
from tailrace.planning.allocation import Allocation, Engines, tp_degrees
from tailrace.planning.hardware.base import Pool
from tailrace.planning.memory import Memory, in_turns, reference_memory
from tailrace.planning.step_times.training import AnalyticTrainingTimes
from tailrace.planning.step_times.training_setup import Layout, MicroBatch, TrainingSetup
from tailrace.simulator.setup import arrivals_s, engines_like, install_s, publish_s, weights_bytes

MOST_GRADERS = 1024
_KEPT_DEGREES = 2
"""TP degrees of engines that are kept for a number of devices."""
_PEAK = 4.0
"""How many times more responses than in the mean end at once, about, for which graders have to be there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Others:
    """The models beside a trainer's."""

    reference: Layout | None = None
    """Of the frozen model; None where there is none."""
    reference_s: float = 0.0
    """Seconds of a step."""
    critic: Training | None = None
    """None where there is none."""
    values_s: float = 0.0
    """Seconds of the values of a step."""

    @property
    def devices(self) -> int:
        """Those that they have, where none is shared."""
        each = (self.reference, None if self.critic is None else self.critic.layout)
        return sum(layout.devices for layout in each if layout is not None)


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
    critic: Memory | None
    """None where there is none."""

    @property
    def engines(self) -> Engines:
        """The engines of a plan, which has those of one kind."""
        (one,) = self.allocation.rollout
        return one


class Candidates:
    """The candidates of a problem."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._weights = weights_bytes(problem.config, problem.shape)
        self._longest = problem.load.batches.longest
        self.trainer = Trainings(problem, problem.shape, problem.setup)
        self.critic = None if problem.critic is None else Trainings(problem, problem.critic, problem.critic_setup)
        self.engines = cache(self._engines)
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
        left = of_trainer.devices - trainer - (rollout if pool is of_trainer else 0)
        return [
            self._candidate(mode, engines, training, others)
            for training in self.trainer.quickest(of_trainer, trainer, streaming=mode.streaming)
            for others in self._others(training, left, streaming=mode.streaming)
            for engines in self._best_engines(mode, pool, rollout)
        ]

    def placed(self, mode: Mode, allocation: Allocation, micro_batch_tokens: int) -> Candidate | None:
        """An allocation in a mode; None where it does not fit in memory, an engine or a TP group is wider than a node,
        or the model has too few heads or layers for it."""
        shape, layout, (old,) = self._problem.shape, allocation.layout, allocation.rollout
        if old.tp not in tp_degrees(shape, old.pool) or old.tp * old.dp > old.pool.per_node:
            return None
        if layout.tp not in tp_degrees(shape, allocation.trainer) or not self.trainer.allows(layout):
            return None
        training = self.trainer.training(allocation.trainer, layout, micro_batch_tokens)
        engines = self._like(old.pool, engines=old.engines, tp=old.tp, dp=old.dp)
        if not training.memory.fits(allocation.trainer.device):
            return None
        if mode.colocated:
            return self._beside(mode, engines, training)
        engines, pool = replace(engines, cache_tokens=engines.room(shape)), allocation.trainer
        left = pool.devices - layout.devices - (engines.devices if engines.pool is pool else 0)
        others = next(self._others(training, left, streaming=mode.streaming), None)
        if others is None or engines.cache_tokens < self._longest:
            return None
        return self._candidate(mode, engines, training, others)

    def of_allocation(self, mode: Mode, allocation: Allocation, micro_batch_tokens: int, graders: int) -> Candidate:
        """An allocation in a mode, whether it fits or not."""
        pool, layout = allocation.trainer, allocation.critic
        training = self.trainer.training(pool, allocation.layout, micro_batch_tokens)
        critic = None
        if self.critic is not None and layout is not None:
            critic = self.critic.training(pool, layout, micro_batch_tokens)
        others = self._with_seconds(training, allocation.reference, critic)
        parts = self.parts(mode, allocation.rollout, training, others)
        parts = replace(parts, grading_s=self._problem.load.grading_s / graders)
        return Candidate(
            mode=mode,
            allocation=allocation,
            micro_batch_tokens=micro_batch_tokens,
            graders=graders,
            parts=parts,
            bound=bound(mode, self._problem.table, parts),
            trainer=training.memory,
            critic=None if critic is None else critic.memory,
        )

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

    def _separated(self, mode: Mode, rollout: Pool, trainer: Pool) -> Iterator[Candidate]:
        for devices in sizes(trainer, trainer.devices):
            for training in self.trainer.quickest(trainer, devices, streaming=mode.streaming):
                free = trainer.devices - devices - (rollout is trainer)
                for others in self._others(training, free, streaming=mode.streaming):
                    taken = devices + others.devices
                    left = rollout.devices - taken if rollout is trainer else rollout.devices
                    for size in sizes(rollout, left):
                        for engines in self._best_engines(mode, rollout, size):
                            yield self._candidate(mode, engines, training, others)

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
        each = sorted(self.trainer.all(pool.name, devices), key=lambda one: one.seconds(streaming=mode.streaming))
        for engines in self.engines(pool.name, devices):
            found = (self._beside(mode, engines, training) for training in each)
            yield from islice((one for one in found if one is not None), KEPT)

    def _beside(self, mode: Mode, engines: Engines, training: Training) -> Candidate | None:
        """Engines and all models that compute beside them on the same devices; None where the longest sample has no
        room."""
        room, reference, critic = self.room_beside(engines, training)
        if room < self._longest:
            return None
        others = self._with_seconds(training, reference, critic)
        return self._candidate(mode, replace(engines, cache_tokens=room), training, others)

    def room_beside(self, engines: Engines, training: Training) -> tuple[float, Layout | None, Training | None]:
        """Tokens in the cache of an engine that shares its devices with a trainer, with a reference and with a critic,
        which are returned, too; none leaves its memory.

        The reference has the least TP degree with which the longest sample has room. The critic is arranged like the
        trainer; there is no room where its model has not the heads or layers for that.
        """
        shape, pool, devices = self._problem.shape, engines.pool, training.layout.devices
        critic, taken = None, training.memory.peak
        if self.critic is not None:
            if not self.critic.allows(training.layout):
                return 0.0, None, None
            critic = self.critic.training(pool, training.layout, training.micro_batch_tokens)
            taken = in_turns({"trainer": training.memory, "critic": critic.memory}).peak
        if not self._problem.table.reference:
            return engines.room(shape, taken_bytes=taken), None, critic
        room, layout = 0.0, Layout()
        for tp in tp_degrees(shape, pool):
            if devices % tp == 0:
                layout = Layout(tp=tp, dp=devices // tp)
                setup = self._problem.setup(layout)
                weights = setup.element_bytes * setup.parameters
                room = engines.room(shape, taken_bytes=taken + weights)
                if room >= self._longest:
                    break
        return room, layout, critic

    def _others(self, training: Training, free: int, *, streaming: bool) -> Iterator[Others]:
        """Yield the models beside a trainer on so many free devices of its pool; nothing where they do not fit there.
        Only of critics there may be several to choose from."""
        reference = None
        if self._problem.table.reference:
            if (reference := self._reference(training)) is None:
                return
            free -= reference.devices
        if self.critic is None:
            if free >= 0:
                yield self._with_seconds(training, reference, None)
            return
        if free < 1:
            return
        for critic in self._critics(self.critic, training, free, streaming=streaming):
            yield self._with_seconds(training, reference, critic)

    def _reference(self, training: Training) -> Layout | None:
        """The arrangement of a reference of as many replicas as keep it below the trainer; None where it fits nowhere
        in a node."""
        each = self.reference_layouts(training.pool, training.micro_batch_tokens)
        layout = next((one for one, memory in each if memory.fits(training.pool.device)), None)
        if layout is None:
            return None
        return replace(layout, dp=math.ceil(self._reference_s(training, layout) / training.whole_s))

    def _critics(self, trainings: Trainings, training: Training, free: int, *, streaming: bool) -> Iterator[Training]:
        """Yield the critics on the fewest devices whose updates take no longer than the trainer's, first without their
        values, then with them; where no number of devices is enough, that on the most of them."""
        most_s = training.seconds(streaming=streaming)
        largest, yielded = None, False
        for devices in sizes(training.pool, free):
            each = trainings.alike(training.pool, devices, training)
            if not each:
                continue
            largest = min(each, key=lambda one: one.seconds(streaming=streaming))
            left_s = most_s - largest.seconds(streaming=streaming)
            is_enough = left_s >= self._values_s(largest)
            if is_enough or (left_s >= 0 and not yielded):
                yield largest
                yielded = True
            if is_enough:
                return
        if largest is not None and not yielded:
            yield largest

    def _with_seconds(self, training: Training, reference: Layout | None, critic: Training | None) -> Others:
        return Others(
            reference=reference,
            reference_s=0.0 if reference is None else self._reference_s(training, reference),
            critic=critic,
            values_s=0.0 if critic is None else self._values_s(critic),
        )

    def reference_layouts(self, pool: Pool, micro_batch_tokens: int) -> list[tuple[Layout, Memory]]:
        """The arrangements of a replica of the reference on a pool with their memory, from few devices to many."""
        largest = replace(self._problem.load.batches, micro_batch_tokens=micro_batch_tokens).largest
        each = [Layout(tp=tp) for tp in tp_degrees(self._problem.shape, pool)]
        return [(layout, reference_memory(self._problem.setup(layout), largest)) for layout in each]

    def _reference_s(self, training: Training, layout: Layout) -> float:
        """Seconds of a step of a reference on devices of the trainer's pool, whose replicas share what there is."""
        one_s = self._scores_s(self._problem.setup(replace(layout, dp=1)), training.pool, training.micro_batch_tokens)
        return one_s / layout.dp

    def _values_s(self, critic: Training) -> float:
        """Seconds of the values of a step."""
        return self._scores_s(self._problem.critic_setup(critic.layout), critic.pool, critic.micro_batch_tokens)

    def _scores_s(self, setup: TrainingSetup, pool: Pool, micro_batch_tokens: int) -> float:
        """Seconds in which the ranks of a model score all samples of a step, those that are not trained on, too."""
        batches, tokens = self._problem.load.batches, float(micro_batch_tokens)
        batch = MicroBatch(tokens=tokens, squares=tokens * batches.mean_length)
        stage_s = AnalyticTrainingTimes(setup, pool).log_probs_s([batch]) / setup.layout.pp
        scored = self._problem.load.attempts * batches.tokens
        return stage_s * (scored / setup.layout.dp / tokens + setup.layout.pp - 1)

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

    def parts(self, mode: Mode, rollout: tuple[Engines, ...], training: Training, others: Others) -> Parts:
        """The parts of a step, without gradings."""
        problem, critic = self._problem, others.critic
        return Parts(
            generation=self.generation(rollout, mode),
            training_s=training.seconds(streaming=mode.streaming) - training.optimizer_s,
            updates_s=training.updates_s,
            claims=training.claims,
            optimizer_s=training.optimizer_s,
            reference_s=others.reference_s,
            values_s=others.values_s,
            critic_s=0.0 if critic is None else critic.seconds(streaming=mode.streaming),
            grading_s=0.0,
            grade_s=problem.load.grade_s,
            publish_s=publish_s(self._weights, training.pool, training.layout),
            arrive_s=0.0 if mode.colocated else self._arrive_s(rollout, training),
            install_s=max(install_s(self._weights, one.pool, one.tp) for one in rollout),
        )

    def _candidate(self, mode: Mode, engines: Engines, training: Training, others: Others) -> Candidate:
        problem, load, rollout, critic = self._problem, self._problem.load, (engines,), others.critic
        parts = self.parts(mode, rollout, training, others)
        graders = problem.config.grading_places
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
                reference=others.reference,
                critic=None if critic is None else critic.layout,
                colocated=mode.colocated,
            ),
            micro_batch_tokens=training.micro_batch_tokens,
            graders=graders,
            parts=parts,
            bound=found,
            trainer=training.memory,
            critic=None if critic is None else critic.memory,
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
