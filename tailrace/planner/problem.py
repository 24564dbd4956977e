"""What is planned for: a recipe, a model, a cluster and a workload, and the checks of these."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from tailrace.algorithms.factory import make_algorithm
from tailrace.algorithms.table import Compute, Generate, Grade, Score, TableTask
from tailrace.config.algorithm import CriticConfig
from tailrace.config.run import RunConfig
from tailrace.errors import PlanError
from tailrace.planner.load import Load
from tailrace.planning.allocation import Engines
from tailrace.planning.critical_path import Graph, graph_of
from tailrace.planning.hardware.base import Cluster, Pool
from tailrace.planning.model_shape.base import ModelShape
from tailrace.planning.model_shape.catalogue import find_shape
from tailrace.planning.step_times.basis import Source
from tailrace.planning.step_times.sources import calibrated, check_profile, source_of
from tailrace.planning.step_times.training_setup import Layout, TrainingSetup
from tailrace.planning.tp_profile import TPProfile
from tailrace.simulator.drawing import draw_steps
from tailrace.simulator.scenario import Remaking
from tailrace.simulator.setup import degrees, engines_like, training_setup
from tailrace.workloads.replay import Replay
from tailrace.workloads.samplers.base import Workload

_DRAWS = 8
"""Further draws of a workload, by which is told how far the lengths of other draws are from these."""
_MOST_DRAWN = 65_536
"""Responses of all further draws together, about; there are two draws at least."""
_FEW = {8192: 1, 2048: 2, 256: 6, 0: 24}
"""Training steps that are drawn, by the least responses of each."""

Times = Callable[[Pool], Source]
"""The steps of engines on a pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """An algorithm's tasks, as far as they cost something."""

    graph: Graph
    rollout: str
    reward: tuple[str, ...]
    reference: tuple[str, ...]
    """Tasks that score with the initial weights."""
    values: tuple[str, ...]
    """Tasks that score with the critic."""
    actor: str
    critic: TableTask | None
    """The task that trains the critic; None where there is none."""
    critic_path: str | None
    """Directory of the critic's initial weights; None: those of the policy."""
    whole_steps: bool
    """Whether advantages are computed of all samples of a training step together."""
    remaking: Remaking | None
    """When groups are remade; None: never."""

    @classmethod
    def of(cls, config: RunConfig) -> "Table":
        """That of a recipe's algorithm.

        Raises:
            PlanError: it trains another model than the policy and one critic, for which there are no costs yet.
        """
        algorithm = make_algorithm(config.resolved_algorithm)
        work = {task.name: task.work for task in algorithm.tasks}
        others = algorithm.other_models()
        critics = [(task, one.make_trainer) for task, one in others if isinstance(one.make_trainer, CriticConfig)]
        if unknown := [task.name for task, _ in others if task.name not in [critic.name for critic, _ in critics[:1]]]:
            raise PlanError(
                f"the algorithm's task {unknown[0]!r} has a model of its own, which is neither planned for nor "
                "simulated; use algorithm.type=grpo, and leave it devices"
            )
        critic, own = critics[0] if critics else (None, None)
        remakes = [one.remake for one in work.values() if isinstance(one, Compute) and one.remake is not None]
        (rollout,) = (name for name, one in work.items() if isinstance(one, Generate))
        return cls(
            graph=graph_of(task.spec for task in algorithm.tasks),
            rollout=rollout,
            reward=tuple(name for name, one in work.items() if isinstance(one, Grade)),
            reference=tuple(name for name, one in work.items() if one == Score()),
            values=tuple(name for name, one in work.items() if isinstance(one, Score) and one.of is not None),
            actor=algorithm.policy_task()[0].name,
            critic=critic,
            critic_path=None if own is None else own.path,
            whole_steps=any(isinstance(one, Compute) and one.of == "step" for one in work.values()),
            remaking=next((Remaking(decide=one.wanted, most=one.most) for one in remakes), None),
        )

    def costs(
        self, *, rollout: float, reward: float, reference: float, actor: float, values: float, critic: float
    ) -> Mapping[str, float]:
        """Seconds of each task."""
        kinds = (
            ((self.rollout,), rollout),
            (self.reward, reward),
            (self.reference, reference),
            (self.values, values),
            ((self.actor,), actor),
            (() if self.critic is None else (self.critic.name,), critic),
        )
        return {name: seconds for names, seconds in kinds for name in names}

    def critic_shape(self, policy: ModelShape) -> ModelShape | None:
        """The model of the critic, where there is one. `policy`: that of the policy.

        Raises:
            PlanError: its directory has none.
        """
        if self.critic is None:
            return None
        return policy if self.critic_path is None else find_shape(self.critic_path)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What is planned for."""

    config: RunConfig
    shape: ModelShape
    cluster: Cluster
    workload: str
    """Its name."""
    drawn: Replay
    """The lengths of a few training steps. They are played again and again, so that every mode has the same work."""
    redrawn: tuple[Load, ...] = ()
    """The same under further draws of the workload; none where the lengths are known."""
    times: Times | None = None
    """By default `source_of`."""
    profile: TPProfile | None = None
    """Measured steps of the model; see `calibrated`."""
    _sources: dict[tuple[str, str, tuple[int, ...]], Source] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(
        cls,
        config: RunConfig,
        shape: ModelShape,
        cluster: Cluster,
        workload: Workload,
        *,
        steps: int | None = None,
        times: Times | None = None,
        profile: TPProfile | None = None,
    ) -> "Problem":
        """Draw so many steps of a workload, by default as many as have some thousand responses, and check what goes
        together.

        Raises:
            PlanError: a sample is too long, the algorithm has a model beside policy and critic, or the critic's is
                not known, or the profile is of other devices, another model or another dtype.
            TraceError: the workload has no such groups.
        """
        if profile is not None:
            dtypes = {engines_like(config, name, pool).dtype for name in config.engines for pool in cluster.pools}
            check_profile(profile, shape, cluster.pools, dtypes)
        steps = steps or _few(config.trainer.train_batch_size)
        drawn = draw_steps(workload, config, shape, steps=steps)
        table = Table.of(config)
        table.critic_shape(shape)
        return cls(
            config=config,
            shape=shape,
            cluster=cluster,
            workload=workload.name,
            drawn=drawn,
            redrawn=tuple(_redrawn(workload, config, steps, table.remaking)),
            times=times,
            profile=profile,
        )

    @cached_property
    def table(self) -> Table:
        """The algorithm's table."""
        return Table.of(self.config)

    @cached_property
    def critic(self) -> ModelShape | None:
        """The model of the critic, where there is one."""
        return self.table.critic_shape(self.shape)

    @cached_property
    def load(self) -> Load:
        """The work of a training step, in the mean.

        Memory has to suffice for the longest sample that the recipe and the context allow, drawn or not.
        """
        load = Load.of(self.drawn, groups=self.config.groups_per_step, remaking=self.table.remaking)
        allowed = min(self.shape.context, self.drawn.longest_prompt + self.config.sampling.max_new_tokens)
        return replace(load, batches=replace(load.batches, longest=max(allowed, load.batches.longest)))

    @property
    def steps(self) -> int:
        """Training steps that are drawn."""
        return len(self.drawn.groups) // self.config.groups_per_step

    def setup(self, layout: Layout) -> TrainingSetup:
        """The trainer, or its reference, in an arrangement."""
        return training_setup(self.config, self.shape, layout)

    def critic_setup(self, layout: Layout) -> TrainingSetup:
        """The critic in an arrangement."""
        assert self.critic is not None, "there is one"
        return training_setup(self.config, self.critic, layout, head="value")

    def source(self, engines: Engines) -> Source:
        """The steps of engines, at all TP degrees that they may have."""
        pool, each = engines.pool, tuple(degrees(self.config, self.shape, engines))
        if (source := self._sources.get((pool.name, engines.dtype, each))) is None:
            source = self._sources[pool.name, engines.dtype, each] = self._source(engines, each)
        return source

    def _source(self, engines: Engines, degrees: Sequence[int]) -> Source:
        pool = engines.pool
        if self.times is not None:
            return self.times(pool)
        found = None if self.profile is None else calibrated(self.profile, self.shape, pool, engines.dtype)
        return source_of(self.shape, pool, degrees, engines.dtype) if found is None else found

    def __getstate__(self) -> dict[str, Any]:
        """What other processes get: they make the step times themselves, and the table, which has functions."""
        return {name: value for name, value in self.__dict__.items() if name != "table"} | {"_sources": {}}

    def under(self, load: Load) -> "Problem":
        """The same with the work of other training steps."""
        other = replace(self)
        other.__dict__["load"] = load
        return other

    def on(self, cluster: Cluster) -> "Problem":
        """The same with another cluster."""
        return replace(self, cluster=cluster, _sources={})


def _redrawn(workload: Workload, config: RunConfig, steps: int, remaking: Remaking | None) -> Iterator[Load]:
    """Draw again, with other seeds. Responses end where the recipe lets them."""
    groups, size = config.groups_per_step, config.algorithm.group_size
    count = max(2, min(_DRAWS, _MOST_DRAWN // (steps * config.trainer.train_batch_size)))
    for number in range(1, count + 1):
        trace = workload.sample(steps=steps, groups=groups, group_size=size, seed=config.seed + number)
        replay = Replay.of(trace).map(lambda script: script.cut(config.sampling.max_new_tokens))
        yield Load.of(replay, groups=groups, remaking=remaking)


def repeated(drawn: Replay, groups: int) -> Replay:
    """So many groups: those that were drawn, again and again."""
    return Replay([drawn.groups[number % len(drawn.groups)] for number in range(groups)])


def _few(batch_size: int) -> int:
    return next(steps for least, steps in _FEW.items() if batch_size >= least)
