"""Advantages of the samples of one group, from their rewards alone."""

import math
from collections.abc import Sequence

import numpy as np


def group_normalized(rewards: Sequence[float], *, normalize_std: bool, eps: float) -> list[float]:
    """Compute (r - mean) / (std + eps), or r - mean without `normalize_std`; std has Bessel's correction.

    Source: GRPO, Shao et al. 2024, "DeepSeekMath", section 4.1.2; without the division, Dr. GRPO, Liu et al. 2025,
    "Understanding R1-Zero-Like Training", section 3.

    Args:
        rewards: of one group. NaN means that grading failed: the sample is left out, and its advantage is 0.
        normalize_std: divide by the standard deviation.
        eps: added to that standard deviation.

    Returns:
        One advantage for each reward; 0 for a single valid sample.
    """
    values = np.array(rewards, np.float64)
    valid = ~np.isnan(values)
    advantages = np.zeros_like(values)
    if valid.sum() > 1:
        centred = values[valid] - values[valid].mean()
        scale = math.sqrt((centred**2).sum() / (len(centred) - 1)) + eps if normalize_std else 1.0
        advantages[valid] = centred / scale
    return [float(advantage) for advantage in advantages]
