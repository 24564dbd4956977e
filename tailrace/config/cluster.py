"""Schemas of worker processes on Ray and of their placement."""

from typing import Annotated, Self

from pydantic import Field, field_validator, model_validator

from tailrace.config.base import Config, Listed, Processes, Seconds
from tailrace.config.engine import EngineConfig

_LEAST_HEARTBEAT_LIMIT_S = 3.0
"""The lowest heartbeat limit: where nothing holds them up, heartbeats and reports come at most 1.5 s apart."""
_NAME = r"^[a-z][a-z0-9_]{0,40}$"
"""The names of pools that a recipe gives."""
ROLLOUT = "rollout"
"""The pool of rollout workers that is not named, and the kind of work of all that are."""
REWARD = "reward"
"""The pool of workers that grade, and the first part of the names of the pools of several rewards."""
MOST_WORKERS = 1024
"""Worker processes of a pool at most."""
_RAY_UNIT = 0.0001
"""The smallest amount of a resource that Ray counts."""


def _counted(amount: float) -> float:
    if 0 < amount < _RAY_UNIT:
        raise ValueError(f"is {amount:g}, and Ray counts in parts of {_RAY_UNIT}; use 0 or at least that")
    return amount


class PoolConfig(Config):
    """The workers of one kind."""

    workers: Processes = 1
    """Number of worker processes."""
    cpus: Annotated[float, Field(ge=0, le=1e6)] = 1.0
    """CPUs that Ray reserves for each worker."""
    gpus: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    """GPUs that Ray reserves for each worker. It sees no others, and none at all with 0. A `device` that is a GPU needs
    some."""
    resources: dict[str, Annotated[float, Field(gt=0, le=1e6)]] = {}
    """Further Ray resources that each worker reserves, such as the name of a kind of machine."""
    threads: Processes | None = None
    """PyTorch threads of each worker; by default as many as `cpus`, but at least one. The ranks of an engine share them
    on CPUs."""
    cores: Annotated[Listed[Annotated[int, Field(ge=0, lt=10**6)]], Field(min_length=1)] | None = None
    """CPU cores of its machine that each worker is bound to; by default it is bound to none."""
    datacentre: str | None = Field(default=None, min_length=1)
    """The workers run on machines that joined Ray with this label `datacentre`; by default on any."""

    @field_validator("cpus", "gpus")
    @classmethod
    def _in_parts_that_ray_counts(cls, amount: float) -> float:
        return _counted(amount)

    @field_validator("resources")
    @classmethod
    def _of_other_kinds(cls, resources: dict[str, float]) -> dict[str, float]:
        for name, amount in resources.items():
            if name.upper() in ("CPU", "GPU"):
                raise ValueError(f"has {name}, which has a key of its own: use {name.lower()}s")
            _counted(amount)
        return resources

    @field_validator("cores")
    @classmethod
    def _each_once(cls, cores: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if cores is not None and len(set(cores)) < len(cores):
            raise ValueError(f"is {list(cores)}, with a core twice; name each once")
        return cores

    @property
    def threads_each(self) -> int:
        """The PyTorch threads of each worker."""
        return self.threads or max(1, int(self.cpus))


class EnginePoolConfig(PoolConfig):
    """Rollout workers that are alike."""

    workers: Annotated[int, Field(ge=0, le=MOST_WORKERS)] = 1
    """Number of worker processes. A pool may begin with 0, and get workers by `tailrace scale`; not all pools may."""
    min_workers: Processes | None = None
    """The fewest workers while the run goes on; with `max_workers` the run chooses between the two by itself. It does
    that in one pool at most."""
    max_workers: Processes | None = None
    """The most workers."""

    @property
    def is_elastic(self) -> bool:
        """Whether the run chooses the number of workers."""
        return self.min_workers is not None or self.max_workers is not None

    @property
    def least(self) -> int:
        """The fewest workers that the run chooses."""
        return self.min_workers or max(1, min(self.workers, self.max_workers or self.workers))

    @property
    def most(self) -> int:
        """The most workers that the run chooses."""
        return self.max_workers or max(self.workers, self.least)

    @model_validator(mode="after")
    def _begins_within_its_bounds(self) -> Self:
        if self.min_workers is not None and self.max_workers is not None and self.min_workers > self.max_workers:
            raise ValueError(
                f"has min_workers {self.min_workers}, which is more than max_workers {self.max_workers}; lower the one "
                "or raise the other"
            )
        if self.is_elastic and not self.least <= self.workers <= self.most:
            raise ValueError(
                f"has {self.workers} workers, which is not from min_workers {self.least} to max_workers {self.most}; "
                "begin with a number between the two"
            )
        return self


class NamedPoolConfig(EnginePoolConfig):
    """Rollout workers of another kind than those of `cluster.rollout`."""

    engine: EngineConfig | None = None
    """What is different in the engines of this pool: keys of the section `engine`, which gives all others."""


class RolloutPoolConfig(EnginePoolConfig):
    """The rollout workers."""

    pools: dict[Annotated[str, Field(pattern=_NAME)], NamedPoolConfig] = {}
    """Further pools of rollout workers by name. Each has the keys of `cluster.rollout` but `pools`, with the same
    defaults, and `engine`: keys of the section `engine` that are different there."""

    @property
    def each(self) -> dict[str, EnginePoolConfig]:
        """All pools by name, the first one as `rollout`, others such as `rollout.large`."""
        return {ROLLOUT: self, **{f"{ROLLOUT}.{name}": pool for name, pool in self.pools.items()}}

    @property
    def total(self) -> int:
        """The rollout workers of all pools at the beginning."""
        return sum(pool.workers for pool in self.each.values())

    @property
    def elastic(self) -> str | None:
        """The pool whose number of workers the run chooses, by name."""
        return next((name for name, pool in self.each.items() if pool.is_elastic), None)

    @model_validator(mode="after")
    def _has_workers(self) -> Self:
        if self.total == 0:
            raise ValueError(
                "has 0 workers" + (" in all of its pools" if self.pools else "") + "; give one pool 1 or more"
            )
        return self

    @model_validator(mode="after")
    def _one_is_elastic(self) -> Self:
        elastic = [pool_key(name) for name, pool in self.each.items() if pool.is_elastic]
        if len(elastic) > 1:
            raise ValueError(
                f"has min_workers or max_workers in {len(elastic)} pools, {' and '.join(elastic)}, and the run chooses "
                "the number of workers of one; leave them out of the others"
            )
        return self


class RewardPoolConfig(PoolConfig):
    """Workers that grade."""

    cpus: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    """CPUs that Ray reserves for each worker."""


class RewardPoolsConfig(RewardPoolConfig):
    """The workers that grade."""

    pools: dict[Annotated[str, Field(pattern=_NAME)], RewardPoolConfig] = {}
    """The workers of each of `rewards.graders` by its name, with the keys of `cluster.reward` but `pools`, and the same
    defaults. The sum is then made in `cluster.reward`."""


_USUAL = (ROLLOUT, "trainer", REWARD, "reference")
"""Pools with a key of their own; those of an algorithm are in `pools`."""


def pool_key(name: str) -> str:
    """The key of the pool of this name in a recipe."""
    kind, _, own = name.partition(".")
    if own:
        return f"cluster.{kind}.pools.{own}"
    return f"cluster.{kind}" if kind in _USUAL else f"cluster.pools.{kind}"


def reward_pool(name: str) -> str:
    """The name of the pool that grades for a reward, by its name in `RewardsConfig.each`."""
    return f"{REWARD}.{name}" if name else REWARD


def kind_of_pool(name: str) -> str:
    """The kind of work of a pool: rollout for rollout.large, reward for reward.judge."""
    return name.partition(".")[0]


def pool_in_table(name: str) -> str:
    """The name of a pool in a run's table of tasks: all rollout pools have the same tasks, each reward has its own."""
    return ROLLOUT if kind_of_pool(name) == ROLLOUT else name


class ClusterConfig(Config):
    """Worker processes on Ray, with `pipeline.placement: separated`."""

    address: str | None = Field(default=None, min_length=1)
    """A running Ray cluster to join: host:port or `auto`. By default a cluster is started on this machine for the run,
    and ended with it."""
    rollout: RolloutPoolConfig = RolloutPoolConfig()
    """Each has an engine, and generates."""
    trainer: PoolConfig = PoolConfig()
    """The worker that updates the weights; there is exactly one."""
    reward: RewardPoolsConfig = RewardPoolsConfig()
    """Workers that grade and compute advantages; each grades in `rewards.workers` processes of its own."""
    reference: PoolConfig = PoolConfig()
    """Workers with the initial weights, for the KL penalty; without a penalty none is started."""
    pools: dict[Annotated[str, Field(pattern=_NAME)], PoolConfig] = {}
    """Further pools by name, for the tasks of your own algorithm; a pool that is not given has one worker."""
    start_limit_s: Seconds = 300.0
    """Seconds in which a worker must be given its place, and again in which it must start and load its model."""
    heartbeat_limit_s: Seconds = 30.0
    """Seconds without a sign of life after which a worker is killed and replaced; at least 3."""
    computation_limit_s: Seconds = 1800.0
    """Seconds that one computation on a worker's device may take, such as a step of the engine, training on the rows
    that were ready or writing a checkpoint. A longer one counts as hung: the worker ends, and counts as dead."""
    max_deaths: Annotated[int, Field(ge=0, le=1000)] = 10
    """Workers that may die within ten minutes; one more death ends the run."""

    def pool(self, name: str) -> PoolConfig:
        """Return the pool of this name."""
        if kind_of_pool(name) == ROLLOUT:
            return self.rollout.each[name]
        kind, _, reward = name.partition(".")
        if kind == REWARD and reward:
            return self.reward.pools.get(reward, RewardPoolConfig())
        if name in _USUAL:
            pool: PoolConfig = getattr(self, name)
            return pool
        return self.pools.get(name, PoolConfig())

    def named(self, kind: str) -> dict[str, PoolConfig]:
        """Return the pools of a kind of work by name: several for rollout workers, else one."""
        return dict(self.rollout.each) if kind == ROLLOUT else {kind: self.pool(kind)}

    @field_validator("pools")
    @classmethod
    def _others_than_the_usual(cls, pools: dict[str, PoolConfig]) -> dict[str, PoolConfig]:
        for name in pools:
            if name in _USUAL:
                raise ValueError(f"has {name}, which has a key of its own: use cluster.{name}")
        return pools

    @field_validator("heartbeat_limit_s")
    @classmethod
    def _more_than_a_beat(cls, limit_s: float) -> float:
        if limit_s < _LEAST_HEARTBEAT_LIMIT_S:
            raise ValueError(
                f"is {limit_s:g}, and a healthy worker may be silent for 1.5 s; use {_LEAST_HEARTBEAT_LIMIT_S:g} "
                "or more"
            )
        return limit_s

    @field_validator("trainer")
    @classmethod
    def _one_trainer(cls, trainer: PoolConfig) -> PoolConfig:
        if trainer.workers != 1:
            raise ValueError(f"has {trainer.workers} workers, and one process trains; use 1")
        return trainer
