"""Advantages of samples from their rewards: of one group by itself, or of the tokens of a whole training step.

A reward of NaN means that grading failed. The sample is left out, and its advantage is 0. A group with fewer than two
other samples has the advantage 0.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from tailrace.types import FloatArray

_Rewards = npt.NDArray[np.float64]


def group_normalized(rewards: Sequence[float], *, normalize_std: bool, eps: float) -> list[float]:
    """Compute (r - mean) / (std + eps), or r - mean without `normalize_std`; std has Bessel's correction.

    Source: GRPO, Shao et al. 2024, "DeepSeekMath", section 4.1.2; without the division, Dr. GRPO, Liu et al. 2025,
    "Understanding R1-Zero-Like Training", section 3.

    Args:
        rewards: of one group.
        normalize_std: divide by the standard deviation.
        eps: added to that standard deviation.

    Returns:
        One advantage for each reward; 0 for a single valid sample.
    """

    def normalized(valid: _Rewards) -> _Rewards:
        centred = valid - valid.mean()
        scale = math.sqrt((centred**2).sum() / (len(centred) - 1)) + eps if normalize_std else 1.0
        return np.asarray(centred / scale)

    return _of_valid(rewards, normalized)


def leave_one_out(rewards: Sequence[float]) -> list[float]:
    """Compute r less the mean of the group's other rewards.

    Source: RLOO, Ahmadian et al. 2024, "Back to Basics", section 3.2.
    """
    return _of_valid(rewards, lambda valid: (valid - valid.mean()) * len(valid) / (len(valid) - 1))


def mean_normalized(rewards: Sequence[float], *, eps: float) -> list[float]:
    """Compute (r - mean) / (mean + eps), and 0 where all rewards are 0.

    It is meant for rewards of 0 and 1. The rarer a right response is in its group, the more it counts.

    Source: MaxRL, Tajwar et al. 2026, "Maximum Likelihood Reinforcement Learning", algorithm 1.

    Raises:
        ValueError: a reward is negative, where the mean is no probability of a right response.
    """

    def normalized(valid: _Rewards) -> _Rewards:
        if (valid < 0).any():
            raise ValueError(f"algorithm.type max_rl needs rewards of 0 or more, and one is {valid.min():g}")
        return np.asarray((valid - valid.mean()) / (valid.mean() + eps))

    return _of_valid(rewards, normalized)


def whitened(
    values: Sequence[npt.NDArray[np.floating]], masks: Sequence[FloatArray], *, eps: float
) -> list[FloatArray]:
    """Compute (v - mean) / sqrt(var + eps) over all tokens of the masks; 0 outside them.

    var has Bessel's correction. A single token, or none, gives 0.

    Source: Hu et al. 2025, "REINFORCE++", equation 11; for PPO, Huang et al. 2022, "The 37 Implementation Details".

    Args:
        values: [R] of each sample.
        masks: [R] each, 1 on tokens that are trained on.
        eps: added to the variance.
    """
    if not values:
        return []
    tokens = np.concatenate([value[mask > 0] for value, mask in zip(values, masks, strict=True)]).astype(np.float64)
    if len(tokens) < 2:
        return [np.zeros(len(value), np.float32) for value in values]
    scale = math.sqrt(tokens.var(ddof=1) + eps)
    mean = tokens.mean()
    return [
        np.where(mask > 0, (value - mean) / scale, 0.0).astype(np.float32)
        for value, mask in zip(values, masks, strict=True)
    ]


def _of_valid(rewards: Sequence[float], normalized: Callable[[_Rewards], _Rewards]) -> list[float]:
    """The advantages of the samples that were graded, 0 for the others and for a single one."""
    values = np.array(rewards, np.float64)
    valid = ~np.isnan(values)
    advantages = np.zeros_like(values)
    if valid.sum() > 1:
        advantages[valid] = normalized(values[valid])
    return [float(advantage) for advantage in advantages]
