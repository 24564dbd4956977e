"""A recipe with the sizes of all that it names, and what follows from these alone."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from tailrace.algorithms.factory import make_algorithm
from tailrace.algorithms.table import Score
from tailrace.config.cluster import ROLLOUT, PoolConfig
from tailrace.config.run import RunConfig
from tailrace.errors import PlanError
from tailrace.planner.load import Load
from tailrace.planner.problem import Table
from tailrace.planning.allocation import Batches
from tailrace.planning.engine_size import EngineSize
from tailrace.planning.model_shape.base import ModelShape
from tailrace.planning.step_times.training_setup import Layout, TrainingSetup
from tailrace.simulator.setup import training_setup


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """Tokens of the prompts to train on."""

    mean: float
    longest: int

    @classmethod
    def of(cls, tokens: Sequence[int]) -> "Prompts":
        """Those with so many tokens each."""
        return cls(mean=statistics.fmean(tokens), longest=max(tokens))


@dataclass(frozen=True, kw_only=True)
class SizedRun:
    """See the module."""

    config: RunConfig
    shape: ModelShape
    engines: Mapping[str, EngineSize | None]
    """That of each rollout pool by its name; None where its size is not known."""
    prompts: Prompts
    pools: Mapping[str, PoolConfig]
    """Those of the run by name."""

    @property
    def separated(self) -> bool:
        """Whether workers have processes of their own."""
        return self.config.pipeline.placement == "separated"

    @property
    def here(self) -> bool:
        """Whether all workers are on this machine."""
        return self.config.cluster.address is None

    @cached_property
    def rollout_workers(self) -> Mapping[str, int]:
        """The number for each rollout pool that has some."""
        if not self.separated:
            return {ROLLOUT: 1}
        return {name: pool.workers for name, pool in self.config.cluster.rollout.each.items() if pool.workers}

    @cached_property
    def sizes(self) -> Mapping[str, EngineSize | None]:
        """The engines of the pools that have workers."""
        return {name: self.engines[name] for name in self.rollout_workers}

    @cached_property
    def table(self) -> Table | None:
        """The algorithm's; None where it trains a model whose size is not known."""
        try:
            return Table.of(self.config)
        except PlanError:
            return None

    @cached_property
    def critic(self) -> TrainingSetup | None:
        """The critic, on one device; None where there is none whose size is known.

        Raises:
            PlanError: its directory has no model.
        """
        shape = None if self.table is None else self.table.critic_shape(self.shape)
        return None if shape is None else training_setup(self.config, shape, self.setup.layout, head="value")

    @cached_property
    def scoring(self) -> frozenset[str]:
        """The pools that score with the initial weights."""
        tasks = make_algorithm(self.config.resolved_algorithm).tasks
        return frozenset(task.pool for task in tasks if task.work == Score())

    @cached_property
    def has_known_trainer(self) -> bool:
        """Whether the trainer is one of Tailrace's own."""
        return self.config.trainer.backend.type != "adapter"

    @cached_property
    def setup(self) -> TrainingSetup:
        """The trainer's, on one device."""
        layout = Layout(checkpointing="full" if self.config.trainer.gradient_checkpointing else "none")
        return training_setup(self.config, self.shape, layout)

    @cached_property
    def load(self) -> Load:
        """A step in which every response is the longest."""
        config, prompt = self.config, self.prompts.mean
        groups, size, new = config.groups_per_step, config.algorithm.group_size, config.sampling.max_new_tokens
        tokens = groups * (prompt + size * new)
        pairs = groups * (prompt**2 + size * new * (2 * prompt + new))
        return Load(
            groups=groups,
            group_size=size,
            prompt=prompt,
            read=groups * prompt,
            lengths=(new,),
            context=prompt + new / 2,
            longest=new,
            tools_s=0.0,
            grading_s=0.0,
            grade_s=0.0,
            batches=Batches(
                tokens=tokens,
                mean_length=pairs / tokens,
                micro_batch_tokens=config.trainer.micro_batch_tokens,
                longest=self.prompts.longest + new,
            ),
        )


def padded(shape: ModelShape, tp: int) -> ModelShape:
    """The model with as many heads as `tp` ranks can share."""
    return replace(shape, heads=-(-shape.heads // tp) * tp)
