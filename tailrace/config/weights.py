"""Schema of the weight transfer."""

from typing import Annotated, Literal

from pydantic import Field

from tailrace.config.base import Config, Seconds

WeightsMode = Literal["synchronous", "delayed", "sub_step", "in_flight"]
ONE_VERSION: tuple[WeightsMode, ...] = ("delayed", "sub_step")
"""Modes whose responses each come from one version, also where engines have different ones."""
WeightsMedium = Literal["auto", "shared_memory", "tcp", "gloo", "nccl"]


class WeightsConfig(Config):
    """The transfer of new weights to the engines, with `pipeline.placement: separated`."""

    mode: WeightsMode | None = None
    """`synchronous`: training waits until every engine has the weights. The other modes move them in the background.
    `delayed`: an engine takes them when it has finished the responses that it has begun. `sub_step`: like `delayed`,
    but engines take turns while the rest keep generating. `in_flight`: an engine takes them at once, and responses go
    on with the new weights. By default synchronous with `pipeline.max_staleness: 0`, otherwise in_flight."""
    medium: WeightsMedium = "auto"
    """The medium that weights travel through. `auto`: shared memory within a machine, TCP between machines. `gloo`,
    `nccl`: broadcasts to all engines of the trainer's datacentre at once, through the memory of CPUs or of GPUs; nccl
    has never run."""
    dtype: Literal["bfloat16", "float32"] | None = None
    """Dtype of floats that travel; by default `engine.dtype`, or float32 where the engine has no such key."""
    chunk_mib: Annotated[float, Field(ge=0.001, le=1024)] = 4.0
    """Size of the pieces in which weights travel, in MiB."""
    timeout_s: Seconds = 600.0
    """Seconds that an engine, or a synchronous update, waits for weights at most. The time in which engines finish
    responses before they take the weights does not count."""
