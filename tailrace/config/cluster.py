"""Schemas of worker processes on Ray, and of where they are placed."""

from typing import Annotated

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, field_validator

from tailrace.config.base import Config


class PoolConfig(Config):
    """The workers of one kind."""

    workers: PositiveInt = 1
    """Processes."""
    cpus: NonNegativeFloat = 1.0
    """CPUs that Ray reserves for each."""
    gpus: NonNegativeFloat = 0.0
    """GPUs that Ray reserves for each; it sees no others."""
    resources: dict[str, PositiveFloat] = {}
    """Further resources of Ray that each reserves, such as the name of a kind of machine."""
    threads: PositiveInt | None = None
    """Threads of torch in each; by default as many as `cpus`, one at the least."""
    cores: Annotated[tuple[NonNegativeInt, ...], Field(min_length=1)] | None = None
    """CPU cores of its machine that each is bound to; by default none is."""

    @property
    def threads_each(self) -> int:
        """Threads of torch in each worker."""
        return self.threads or max(1, int(self.cpus))


class ClusterConfig(Config):
    """Worker processes on Ray, with `pipeline.placement: separated`."""

    address: str | None = Field(default=None, min_length=1)
    """A running Ray cluster to join, host:port or `auto`; by default one is started for the run on this machine, and
    ended with it."""
    rollout: PoolConfig = PoolConfig()
    """Each has an engine, and generates."""
    trainer: PoolConfig = PoolConfig()
    """It updates the weights; one worker."""
    reward: PoolConfig = PoolConfig(cpus=0.0)
    """Each grades in `rewards.workers` processes of its own, and computes advantages."""
    reference: PoolConfig = PoolConfig()
    """Each has the initial weights, for the KL penalty; none is started without one."""
    start_limit_s: PositiveFloat = 300.0
    """Seconds in which a worker must have started, its model loaded."""
    heartbeat_limit_s: PositiveFloat = 30.0
    """Seconds without a sign of life after which a worker is killed and replaced."""
    max_deaths: NonNegativeInt = 10
    """Workers that may die within ten minutes; with one more the run ends."""

    @field_validator("trainer")
    @classmethod
    def _one_trainer(cls, trainer: PoolConfig) -> PoolConfig:
        if trainer.workers != 1:
            raise ValueError(f"workers is {trainer.workers}, and one process trains; use 1")
        return trainer
