"""What a worker is told of its run."""

import msgspec

from tailrace.config.run import RunConfig
from tailrace.transfer.queue.address import QueueAddress
from tailrace.transfer.weights.address import WeightsAddress


class RunSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of every worker of a run."""

    config: str
    """A RunConfig as JSON."""
    model_dir: str
    """A directory that every machine of the run has under this name, as are the other paths."""
    queue: QueueAddress
    origin: float
    """Unix time at which the run's clock was 0."""
    prompts: str
    """Fingerprint of the prompts that checkpoints count in."""
    longest_prompt: int
    """Tokens of it."""
    checkpoints: str
    """Directory of the run's checkpoints."""
    weights: WeightsAddress | None = None
    """Where new weights come from; for rollout workers."""

    @property
    def run_config(self) -> RunConfig:
        """The run's configuration."""
        return RunConfig.model_validate_json(self.config)

    def encode(self) -> bytes:
        """For `WorkerSpec.settings`."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> "RunSettings":
        """What `encode` gave."""
        return msgspec.msgpack.decode(data, type=cls)
