"""Surrogates: the loss of each token, whose gradient is that of the expected advantage.

With r = exp(log_probs - old_log_probs) of a token, A its advantage, and clip(r) = min(max(r, 1 - clip_low), 1 +
clip_high):

    clipped           -min(r A, clip(r) A)                               PPO, GRPO and most others
    sequence_clipped  the same, with the geometric mean of its response  GSPO
    weight_clipped    -stop(clip(r)) A log_probs                         CISPO

No value outside the mask, not even NaN, reaches a loss or a gradient.
"""

from dataclasses import dataclass

import torch

from tailrace.algorithms.loss_inputs import LossInputs

MOST_LOG_RATIO = 20.0
"""Bound of log-ratios: beyond it a ratio would overflow, and a token there is clipped or hopeless anyway."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surrogate:
    """The loss of each token. Tokens outside the mask have ratio 1 and no gradient."""

    loss_N: torch.Tensor
    ratio_N: torch.Tensor
    """The ratio that is clipped."""
    log_ratio_N: torch.Tensor
    """Of the token itself: log_probs - old_log_probs."""
    clipped_low_N: torch.Tensor
    """bool: the bound below 1 replaced the ratio."""
    clipped_high_N: torch.Tensor
    """bool: the bound above 1 replaced the ratio."""


def clipped(inputs: LossInputs, *, clip_low: float, clip_high: float) -> Surrogate:
    """Compute -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A), ratio = exp(log_probs - old_log_probs).

    A token that is clipped has no gradient.

    Source: PPO, Schulman et al. 2017, equation 7. The bound above may be larger than the one below: clip-higher, DAPO,
    Yu et al. 2025, section 3.1.
    """
    log_ratio = log_ratios(inputs)
    return _clipped(inputs, log_ratio, log_ratio, clip_low, clip_high)


def sequence_clipped(inputs: LossInputs, *, clip_low: float, clip_high: float) -> Surrogate:
    """Compute the clipped surrogate with one ratio for all tokens of a response, exp(mean of their log-ratios).

    Each token's ratio has the value of its response, and the gradient of its own log-probability. So the advantage may
    differ from token to token (GSPO-token).

    Source: GSPO, Zheng et al. 2025, equations 7 and 13 to 15.
    """
    own = log_ratios(inputs)
    of_response = (inputs.sums_S(own.detach()) / inputs.sums_S(inputs.mask_N).clamp(min=1))[inputs.sample_N]
    log_ratio = torch.where(inputs.mask_N > 0, of_response + (own - own.detach()), 0.0)
    return _clipped(inputs, log_ratio, own, clip_low, clip_high)


def weight_clipped(inputs: LossInputs, *, clip_low: float, clip_high: float) -> Surrogate:
    """Compute -clip(ratio, 1 - clip_low, 1 + clip_high) * A * log_probs, without a gradient of the first factor.

    All tokens keep a gradient; a rare token that became likelier is only weighted less.

    Source: CISPO, MiniMax 2025, "MiniMax-M1", equations 4 and 5.
    """
    log_ratio = log_ratios(inputs)
    ratio = _ratio(log_ratio).detach()
    log_probs = torch.where(inputs.mask_N > 0, inputs.log_probs_N, 0.0)
    low, high = 1 - clip_low, 1 + clip_high
    return Surrogate(
        loss_N=-ratio.clamp(low, high) * _advantages(inputs) * log_probs,
        ratio_N=ratio,
        log_ratio_N=log_ratio,
        clipped_low_N=ratio < low,
        clipped_high_N=ratio > high,
    )


def log_ratios(inputs: LossInputs) -> torch.Tensor:
    """[N] log_probs - old_log_probs, 0 outside the mask."""
    return torch.where(inputs.mask_N > 0, inputs.log_probs_N - inputs.old_log_probs_N, 0.0)


def _clipped(
    inputs: LossInputs, log_ratio: torch.Tensor, own: torch.Tensor, clip_low: float, clip_high: float
) -> Surrogate:
    advantages = _advantages(inputs)
    ratio = _ratio(log_ratio)
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    return Surrogate(
        loss_N=-torch.minimum(ratio * advantages, bounded * advantages),
        ratio_N=ratio,
        log_ratio_N=own,
        clipped_low_N=(ratio < 1 - clip_low) & (advantages < 0),
        clipped_high_N=(ratio > 1 + clip_high) & (advantages > 0),
    )


def _ratio(log_ratio: torch.Tensor) -> torch.Tensor:
    return log_ratio.clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO).exp()


def _advantages(inputs: LossInputs) -> torch.Tensor:
    return torch.where(inputs.mask_N > 0, inputs.advantages_N, 0.0)
