"""Checks whether the figures of a step show training on something else than what was sampled."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from tailrace.config.run import RunConfig

_CAUSES = (
    "engine and trainer compute different models or distributions. Look at an engine, trainer or loss of your own, at "
    "the model's files, and at new weights that do not arrive"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalCheck:
    """Bounds on the metrics of a `step` event."""

    mismatch_warning: float = math.inf
    mismatch_error: float = math.inf
    max_staleness: float = math.inf
    rounding: str = ""
    """A further cause: how engines round the weights that the trainer computes with, if they do."""

    @classmethod
    def of(cls, config: RunConfig) -> Self:
        """The bounds of a run."""
        warning, error = config.mismatch_bounds
        return cls(
            mismatch_warning=warning,
            mismatch_error=error,
            max_staleness=config.pipeline.max_staleness,
            rounding=_rounding(config),
        )

    def error(self, step: int, metrics: Mapping[str, float]) -> str | None:
        """The reason why the run cannot go on; None where it can."""
        mismatch, age = metrics.get("on_policy_mismatch", 0.0), metrics.get("staleness_max", 0.0)
        if age > self.max_staleness:
            return (
                f"step {step + 1} has trained on tokens of weights {age:.0f} versions old, and pipeline.max_staleness "
                f"is {self.max_staleness:g}: an engine does not take new weights, or gives its tokens wrong versions"
            )
        if _is_above(mismatch, self.mismatch_error):
            return (
                f"step {step + 1} has on_policy_mismatch {mismatch:.3g} nats, above trainer.mismatch_error "
                f"{self.mismatch_error:g}: {self._causes}; or raise the bound"
            )
        return None

    def warning(self, step: int, metrics: Mapping[str, float]) -> str | None:
        """The text of a warning; None where nothing seems wrong."""
        mismatch = metrics.get("on_policy_mismatch", 0.0)
        if _is_above(mismatch, self.mismatch_warning):
            return (
                f"step {step + 1} has on_policy_mismatch {mismatch:.3g} nats, above trainer.mismatch_warning "
                f"{self.mismatch_warning:g}: maybe {self._causes}"
            )
        return None

    @property
    def _causes(self) -> str:
        return f"{_CAUSES}{self.rounding}"


def _rounding(config: RunConfig) -> str:
    dtype = config.generated_in
    if config.trainer.precision != "fp32" or dtype in (None, "float32"):
        return ""
    return (
        f"; or engines in {dtype} lose the small updates of weights that the trainer has in fp32: use engine.dtype "
        "float32, or trainer.precision bf16"
    )


def _is_above(mismatch: float, bound: float) -> bool:
    """Whether a figure is above a bound, or no number. Nothing is above an infinite bound: there is none."""
    return bound < math.inf and not mismatch <= bound
