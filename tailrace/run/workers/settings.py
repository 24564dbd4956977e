"""The settings that a worker gets of its run."""

from collections.abc import Mapping

import msgspec

from tailrace.algorithms.factory import make_run_algorithm
from tailrace.config.cluster import PoolConfig, pool_key, reward_pool
from tailrace.config.rewards import ModelReward, grader_key
from tailrace.config.run import RunConfig
from tailrace.errors import ConfigError
from tailrace.run.workers.pools import uses_device
from tailrace.transfer.queue.address import QueueAddress


def check_gpus(config: RunConfig, pools: Mapping[str, PoolConfig]) -> None:
    """Check that each of `pools`, by name, whose workers use a device reserves a GPU where that is one.

    Raises:
        ConfigError: one does not; its workers would see no GPU.
    """
    _check_reward_models(config, pools)
    device = config.device
    if device.partition(":")[0] != "cuda":
        return
    algorithm = make_run_algorithm(config)
    without = [name for name, pool in pools.items() if not pool.gpus and uses_device(algorithm, name)]
    if without:
        names = ", ".join(f"{pool_key(name)}.gpus" for name in without)
        raise ConfigError(
            f"device is {device}, and {names} {'is' if len(without) == 1 else 'are'} 0: these workers would see no GPU;"
            f" give each what it reserves, such as {pool_key(without[0])}.gpus=1"
        )


def _check_reward_models(config: RunConfig, pools: Mapping[str, PoolConfig]) -> None:
    for name, grading in config.rewards.each.items():
        pool = reward_pool(name)
        device = grading.grader.device if isinstance(grading.grader, ModelReward) else "cpu"
        if device.startswith("cuda") and pool in pools and not pools[pool].gpus:
            raise ConfigError(
                f"{grader_key(name)}.device is {device}, and {pool_key(pool)}.gpus is 0: the reward model would see no "
                f"GPU; give each of its workers what it reserves, such as {pool_key(pool)}.gpus=1"
            )


class RunSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of every worker of a run."""

    config: str
    """A RunConfig as JSON."""
    model_dir: str
    """Directory of the model. Every machine of the run has it under this name, like the other paths."""
    queue: QueueAddress
    pool: str = ""
    """The name of the worker's pool."""
    origin: float
    """Unix time at which the run's clock was 0."""
    prompts: str
    """Fingerprint of the prompts that checkpoints count in."""
    longest_prompt: int
    """Tokens of the longest prompt."""
    checkpoints: str
    """Directory of the run's checkpoints."""

    @property
    def run_config(self) -> RunConfig:
        """The run's configuration."""
        return RunConfig.model_validate_json(self.config)

    def encode(self) -> bytes:
        """The settings as bytes, for `WorkerSpec.settings`."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> "RunSettings":
        """Decode the bytes that `encode` returned."""
        return msgspec.msgpack.decode(data, type=cls)
