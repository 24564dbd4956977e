"""The trainers of a model that fit on so many devices, each with the seconds of its step."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from heapq import nsmallest

from tailrace.planner.problem import Problem
from tailrace.planning.allocation import Batches, layouts
from tailrace.planning.hardware.base import Pool
from tailrace.planning.memory import Memory, trainer_memory
from tailrace.planning.model_shape.base import ModelShape
from tailrace.planning.packing import Lengths
from tailrace.planning.step_times.training import AnalyticTrainingTimes
from tailrace.planning.step_times.training_setup import Layout, MicroBatch, TrainingSetup
from tailrace.simulator.scenario import TrainerKind
from tailrace.simulator.trainer import claim_of, update_s

MICRO_BATCH_TOKENS = (8192, 16_384, 32_768, 65_536)
"""Sizes of micro-batches to choose from."""
KEPT = 2
"""Arrangements of a trainer that are kept for a number of devices and a way to claim."""


def sizes(pool: Pool, most: int) -> list[int]:
    """Numbers of devices of a pool to try: any in a node, then halves of nodes, about eight numbers for each doubling;
    and `most`."""
    found = set(range(1, 9)) | {number << exponent for exponent in range(most.bit_length()) for number in range(8, 16)}
    half = max(1, pool.per_node // 2)
    return sorted(size for size in found | {most} if size <= most and (size <= pool.per_node or size % half == 0))


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
    updates_s: float
    """What of both is spent in several updates, after the log-probabilities of all samples; 0 with one update, which
    may begin with the first of them."""
    claims: float
    optimizer_s: float

    def seconds(self, *, streaming: bool) -> float:
        """Seconds of a step."""
        return (self.streamed_s if streaming else self.whole_s) + self.optimizer_s


class Trainings:
    """The trainers of a model: of the policy, or of a critic."""

    def __init__(self, problem: Problem, shape: ModelShape, setup: Callable[[Layout], TrainingSetup]) -> None:
        """`shape`: the model's. `setup`: its trainer in an arrangement."""
        self._problem = problem
        self._shape = shape
        self._setup = setup
        self.all = cache(self._all)
        self._alike = cache(self._made_alike)

    def training(self, pool: Pool, layout: Layout, micro_batch_tokens: int) -> Training:
        """A trainer, whether it fits or not."""
        largest = replace(self._problem.load.batches, micro_batch_tokens=micro_batch_tokens).largest
        memory = trainer_memory(self._setup(layout), largest)
        return self._training(layout, pool, micro_batch_tokens, memory)

    def allows(self, layout: Layout) -> bool:
        """Whether the model has heads and layers for an arrangement."""
        return not self._shape.heads % layout.tp and layout.pp <= self._shape.layers

    def quickest_of(self, pool: Pool, devices: int, micro_batch_tokens: int, *, streaming: bool) -> list[Training]:
        """Trainers with such micro-batches that fit, the quickest first; see `all` on layers' inputs on the host."""
        each = list(self.layouts(pool, devices))
        for arrangements in (each, offloaded(each)):
            trainers = [self.training(pool, layout, micro_batch_tokens) for layout in arrangements]
            if fitting := [one for one in trainers if one.memory.fits(pool.device)]:
                return sorted(fitting, key=lambda one: one.seconds(streaming=streaming))
        return []

    def alike(self, pool: Pool, devices: int, other: Training) -> list[Training]:
        """Trainers that fit on so many devices with the micro-batches of another model's, and recompute as that does:
        a recipe has one key for both."""
        layout = other.layout
        return self._alike(pool.name, devices, other.micro_batch_tokens, layout.checkpointing, layout.offload)

    def _made_alike(
        self, pool_name: str, devices: int, tokens: int, checkpointing: str, offload: bool
    ) -> list[Training]:
        pool = self._problem.cluster.pool(pool_name)
        same = (one for one in layouts(self._shape, pool, devices) if one.checkpointing == checkpointing)
        each = [self.training(pool, replace(layout, offload=offload), tokens) for layout in same]
        return [one for one in each if one.memory.fits(pool.device)]

    def _all(self, pool_name: str, devices: int) -> list[Training]:
        """Trainers that fit on so many devices; those with layers' inputs on the host only where no other does."""
        pool = self._problem.cluster.pool(pool_name)
        each = list(self.layouts(pool, devices))
        if found := list(self._fitting(pool, each)):
            return found
        return list(self._fitting(pool, offloaded(each)))

    def layouts(self, pool: Pool, devices: int) -> Iterator[Layout]:
        """The arrangements of a trainer on so many devices. Where the recipe says whether to recompute, only these."""
        trainer = self._problem.config.trainer
        is_free = "gradient_checkpointing" not in trainer.model_fields_set
        for layout in layouts(self._shape, pool, devices):
            if is_free or trainer.gradient_checkpointing == (layout.checkpointing == "full"):
                yield layout

    def _fitting(self, pool: Pool, each: Iterable[Layout]) -> Iterator[Training]:
        batches = self._problem.load.batches
        for layout in each:
            setup = self._setup(layout)
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
            AnalyticTrainingTimes(self._setup(layout), pool),
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
        times = AnalyticTrainingTimes(self._setup(layout), training.pool)
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
        each = self.all(pool.name, devices)
        orders = [lambda one: one.seconds(streaming=streaming)]
        if streaming:
            orders.append(lambda one: one.seconds(streaming=True) + one.streamed_s / one.claims)
        found = [one for order in orders for one in nsmallest(KEPT, each, key=order)]
        return list({id(one): one for one in found}.values())


def offloaded(each: Iterable[Layout]) -> list[Layout]:
    """The arrangements that compute layers again, with the layers' inputs on the host."""
    return [replace(layout, offload=True) for layout in each if layout.checkpointing == "full"]


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
    updates_s = updates * (count + layout.pp - 1) * stage_s
    scoring, score_s = mini_batches * count, times.log_probs_s([batch]) / layout.pp
    return Training(
        pool=pool,
        layout=layout,
        micro_batch_tokens=batches.micro_batch_tokens,
        memory=memory,
        whole_s=updates_s if updates == 1 else updates_s + (scoring + layout.pp - 1) * score_s,
        streamed_s=count * layout.pp * stage_s if updates == 1 else updates_s + scoring * layout.pp * score_s,
        updates_s=0.0 if updates == 1 else updates_s,
        claims=float(count),
        optimizer_s=updates * optimizer_s,
    )
