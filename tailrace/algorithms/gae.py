"""Generalized advantage estimation: Schulman et al. 2016, equations 11 to 16.

    δ_t = r_t + γ V_{t+1} - V_t
    A_t = δ_t + γ λ A_{t+1}

V beyond the last token is 0: the response has ended there.
"""

import numpy as np
import numpy.typing as npt

from tailrace.types import FloatArray, IntArray


def gae(
    rewards: npt.NDArray[np.floating],
    values: FloatArray,
    mask: IntArray | FloatArray,
    *,
    discount: float,
    gae_lambda: float,
) -> FloatArray:
    """Compute the advantage of each token of a response. 0 outside the mask, over which the recursion passes.

    Args:
        rewards: [R] of each token.
        values: [R] the critic's value of the state before each token.
        mask: [R] 1 on tokens of the policy.
        discount: γ.
        gae_lambda: λ.
    """
    own = np.asarray(mask, np.float32) > 0
    r, v = rewards[own].astype(np.float64), values[own].astype(np.float64)
    errors: npt.NDArray[np.float64] = r + discount * np.append(v[1:], 0.0) - v
    advantages, following = np.zeros(len(errors)), 0.0
    for t in range(len(errors) - 1, -1, -1):
        following = errors[t] + discount * gae_lambda * following
        advantages[t] = following
    found = np.zeros(len(own), np.float32)
    found[own] = advantages
    return found


def adapted_lambda(tokens: int, alpha: float) -> float:
    """Compute 1 - 1 / (alpha * tokens), 0 or more: λ of a response of so many tokens.

    Source: VAPO, Yue et al. 2025, equation 6.
    """
    return max(0.0, 1 - 1 / (alpha * max(1, tokens)))
