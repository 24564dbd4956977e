"""Corrections for tokens that were sampled by other weights than those they train."""

from dataclasses import dataclass

import torch

from tailrace.algorithms.loss_inputs import LossInputs


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCorrection:
    """Factors of token losses, without gradient."""

    weight_N: torch.Tensor
    """The factor of each token; 1 outside the mask."""
    truncated_N: torch.Tensor
    """bool: the limit replaced the ratio."""


def truncated_importance(inputs: LossInputs, *, limit: float) -> TokenCorrection:
    """Compute min(exp(old_log_probs - rollout_log_probs), limit) of each token.

    The surrogate with ratio exp(log_probs - old_log_probs) is unbiased for tokens that the old weights drew. An engine
    that held older weights, or computes in another precision, drew them from another distribution. The factor corrects
    for that, and the limit bounds its variance.

    Source: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training"; the truncation,
    Espeholt et al. 2018, "IMPALA", section 4.1.

    Raises:
        ValueError: the log-probabilities of the engine are missing.
    """
    if inputs.rollout_log_probs_N is None:
        raise ValueError(
            "a rollout correction needs rollout_log_probs; have the engine give them or set "
            "algorithm.rollout_correction.type to none"
        )
    # No value outside the mask, not even NaN, may reach the loss or the metrics.
    log_ratio = torch.where(inputs.mask_N > 0, inputs.old_log_probs_N - inputs.rollout_log_probs_N, 0.0)
    ratio = log_ratio.detach().exp()
    return TokenCorrection(weight_N=ratio.clamp(max=limit), truncated_N=ratio > limit)
