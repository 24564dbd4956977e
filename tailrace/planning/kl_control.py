"""The coefficient of an adaptive KL penalty, step after step.

Source: Ziegler et al. 2019, "Fine-tuning language models from human preferences", section 2.2:
e = clip((KL - target) / target, -0.2, 0.2), and the next coefficient is the present one times 1 + gain · e.
"""

import math
from collections.abc import Sequence

from tailrace.config.algorithm import AdaptiveKl, KlConfig

MOST_ERROR = 0.2
"""The error is clipped, so that one step with a strange divergence hardly matters."""
MOST_COEFFICIENT = 1000.0


def next_coefficient(coefficient: float, divergence: float, config: AdaptiveKl) -> float:
    """The coefficient after a step with this mean divergence, in nats per token.

    A divergence that is not finite, such as that of a step without a token to train on, changes nothing.
    """
    if not math.isfinite(divergence):
        return coefficient
    error = min(max(divergence / config.target - 1, -MOST_ERROR), MOST_ERROR)
    return min(coefficient * (1 + config.gain * error), MOST_COEFFICIENT)


class KlCoefficients:
    """The coefficient of each step of a run.

    Step s has the one that `max(0, s - max_staleness)` trained steps led to. These have ended whenever a prompt of step
    s is admitted, so the coefficient of a step depends on neither timing nor the number of its engines.
    """

    def __init__(self, config: KlConfig, max_staleness: int) -> None:
        """`config`: that of an adaptive penalty."""
        self._config = config
        self._max_staleness = max_staleness
        self._first_version = 0
        self._after = [config.coefficient]
        """The coefficient after each number of trained steps, from `_first_version` on."""

    @property
    def trained_steps(self) -> int:
        """Number of steps that have ended."""
        return self._first_version + len(self._after) - 1

    @property
    def newest(self) -> float:
        """The coefficient after the steps that have ended."""
        return self._after[-1]

    def step_ended(self, divergence: float) -> None:
        """One more step has ended, with this mean divergence, in nats per token."""
        assert self._config.adaptive is not None
        self.follow(next_coefficient(self.newest, divergence, self._config.adaptive))

    def follow(self, coefficient: float) -> None:
        """One more step has ended, and led to this coefficient in another process."""
        self._after.append(coefficient)

    def of_step(self, step: int) -> float | None:
        """The coefficient of a step; None where the steps that lead to it have not ended.

        A step that ended before a resumed run began has the oldest one that is known.
        """
        version = max(step - self._max_staleness, self._first_version)
        return None if version > self.trained_steps else self._after[version - self._first_version]

    def saved(self) -> list[float]:
        """What a checkpoint keeps: enough for every step that has not ended."""
        return self._after[-self._max_staleness - 1 :]

    def restore(self, trained_steps: int, saved: Sequence[float]) -> None:
        """Go on after `trained_steps` with what `saved` returned then; without any, with the newest one of here."""
        self._after = list(saved) or [self.newest]
        self._first_version = trained_steps - len(self._after) + 1
