"""Schemas of the trainer and of checkpoints."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, Strict

from tailrace.config.base import Config, Count, CountFromZero, Keywords
from tailrace.errors import quoted


class SingleTrainerBackend(Config):
    """Tailrace's own trainer, on one device."""

    type: Literal["single"] = "single"


class AdapterTrainerBackend(Config):
    """Your own trainer, see docs/adapters.md. `f(args, **options)` makes it."""

    type: Literal["adapter"] = "adapter"
    path: str
    """Dotted path of `f`, such as my_package.my_trainer.MyTrainer; the working directory is importable."""
    options: Keywords = {}
    """Keyword arguments of `f`."""


TrainerBackend = Annotated[SingleTrainerBackend | AdapterTrainerBackend, Field(discriminator="type")]


Mismatch = Annotated[float, Field(ge=1e-9, le=1000)]


def _trains(steps: Any) -> Any:
    if type(steps) is int and steps == 0:
        raise ValueError(
            "is 0, which trains nothing; to evaluate the model as it is: tailrace eval MODEL --recipe RECIPE"
        )
    return steps


Beta = Annotated[float, Field(ge=0, lt=1)]


class TrainerConfig(Config):
    """The actor update."""

    backend: TrainerBackend = SingleTrainerBackend()
    """The implementation of the update."""
    steps: Annotated[Count, BeforeValidator(_trains)] = 100
    """Number of training steps; each makes and trains on train_batch_size samples."""
    train_batch_size: Count = 32
    """Number of samples of a step: prompts times group_size."""
    mini_batch_size: Count | None = None
    """Number of samples of an optimizer step; train_batch_size by default."""
    epochs: Count = 1
    """How often each training step goes through its samples."""
    frozen_steps: CountFromZero = 0
    """Number of training steps at the beginning that leave the policy as it is, so that a critic learns first."""
    micro_batch_tokens: Count = 4096
    """Token budget of one forward and backward pass; a shared prompt counts once."""
    precision: Literal["bf16", "fp32"] = "bf16"
    """bf16 is autocast over fp32 master weights. The default is fp32 on this machine's CPU, if that has no instructions
    for bf16."""
    lr: Annotated[float, Field(ge=1e-15, le=10)] = 1e-6
    """Peak learning rate of AdamW."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate decays after the warm-up."""
    warmup_steps: CountFromZero = 0
    """Number of optimizer steps in which the learning rate rises linearly from 0."""
    betas: Annotated[tuple[Beta, Beta], Strict(False)] = (0.9, 0.999)
    """Betas of AdamW."""
    eps: Annotated[float, Field(ge=1e-15, le=1)] = 1e-8
    """Epsilon of AdamW."""
    weight_decay: Annotated[float, Field(ge=0, le=100)] = 0.0
    """Weight decay of AdamW; on matrices only."""
    max_grad_norm: Annotated[float, Field(ge=1e-6, le=1e6)] = 1.0
    """Norm to which larger gradients are scaled down."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    mismatch_warning: Mismatch | None = None
    """Warn when a step's `on_policy_mismatch` is larger. It is the mean distance, in nats, of the engine's
    log-probabilities from the trainer's, over responses made by the weights of the step. By default 0.001 where engine
    and trainer compute in fp32, 0.15 where one rounds to bf16. Neither bound is for engine.type fake, nor for top_k,
    top_p or min_p, with which the two differ by design."""
    mismatch_error: Mismatch | None = None
    """End the run when `on_policy_mismatch` is larger, or no number. By default 0.1 in fp32, and 0.5 in bf16."""
    max_nonfinite_steps: Count = 3
    """Number of optimizer steps in a row that may be skipped for a non-finite loss or gradient before the run stops."""


def _is_of_evaluations(figure: str) -> str:
    if not figure.removeprefix("eval/") or not figure.startswith("eval/"):
        raise ValueError(f"is {quoted(figure)}; expected the name of a figure of evaluations, such as eval/accuracy")
    return figure


class CheckpointConfig(Config):
    """The checkpoints of a run."""

    every: Count = 50
    """Steps between checkpoints; the last step always makes one."""
    keep: Count = 2
    """Number of checkpoints kept; older ones are deleted."""
    keep_best: Annotated[str, AfterValidator(_is_of_evaluations)] | None = None
    """A figure of evaluations, such as eval/accuracy or eval/sampled/pass@8. Of the checkpoints whose step was
    evaluated, the one with the highest figure is kept, too, beside the newest `keep`."""
