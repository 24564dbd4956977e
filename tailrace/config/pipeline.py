"""Schemas of the main loop and of what is observed of it."""

from pydantic import Field

from tailrace.config.base import Config


class PipelineConfig(Config):
    """How tasks overlap."""

    streaming: bool = False
    """Off (synchronous): the actor update waits for the whole batch. On: it takes each micro-batch as it fills."""
    in_order: bool = False
    """Streaming only: groups are trained in the order of their prompts, which makes the update bit-identical
    to the synchronous one, instead of in the order in which they finish."""


class ObserveConfig(Config):
    """Where metrics go, beside events.jsonl and the live display."""

    tensorboard: bool = True
    """Write TensorBoard files into the run's directory."""
    wandb_project: str | None = Field(default=None, min_length=1)
    """Log to this Weights & Biases project; needs `pip install wandb`."""
