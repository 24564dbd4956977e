"""Corrections for tokens that were sampled by other weights than those they train.

With r = exp(old_log_probs - rollout_log_probs) of a token, which is 1 where nothing is stale and the engine computes as
the trainer does:

    weights    the loss of each token is multiplied by r, or by the mean or the product of r over its response
    rejection  tokens or responses whose r, or whose divergence, is out of bounds are not trained on at all

With the weights, a clipped surrogate is decoupled PPO: Hilton et al. 2022, "Batch size-invariance for policy
optimization"; for language models AReaL, Fu et al. 2025, section 5.2. What sampled is its behavior policy. The weights
at the start of the step are its proximal policy, which clipping measures from.
"""

import math
from dataclasses import dataclass, replace

import torch

from tailrace.algorithms.kl import kl_estimate
from tailrace.algorithms.loss_inputs import LossInputs
from tailrace.algorithms.surrogates import MOST_LOG_RATIO
from tailrace.config.algorithm import MaskedCorrection, RatioBounds, RatioLevel, RolloutRejection, TruncatedCorrection


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Factors of token losses, without gradient."""

    weight_N: torch.Tensor
    """The factor of each token; 1 outside the mask."""
    bounded_N: torch.Tensor
    """bool: the ratio is out of bounds, so that the factor is the limit or 0."""


def importance_weights(inputs: LossInputs, correction: TruncatedCorrection | MaskedCorrection) -> Weights:
    """Compute the ratio r of each token, or of its response, up to a limit; or between two bounds, and 0 beyond them.

    The surrogate with ratio exp(log_probs - old_log_probs) is unbiased for tokens that the old weights drew. An engine
    that held older weights, or computes in another precision, drew them from another distribution. The factor corrects
    for that, and its bounds limit its variance.

    Source: truncated, Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training", and
    Espeholt et al. 2018, "IMPALA", section 4.1. Masked by token: IcePop, Ling team 2025, "Every step evolves". By
    sequence: Liu et al. 2025, "When speed kills stability".

    Raises:
        ValueError: the log-probabilities of the engine are missing.
    """
    log_ratio = _at_level(rollout_log_ratios(inputs), inputs, correction.level)
    ratio = log_ratio.clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO).exp()
    if isinstance(correction, TruncatedCorrection):
        return Weights(weight_N=ratio.clamp(max=correction.limit), bounded_N=ratio > correction.limit)
    inside = (ratio >= correction.lower) & (ratio <= correction.upper)  # NaN is not
    return Weights(weight_N=torch.where(inside, ratio, 0.0), bounded_N=~inside)


def without_rejected(inputs: LossInputs, rejection: RolloutRejection | None) -> LossInputs:
    """Take what is out of bounds out of the mask, so that it is in no loss, no gradient and no denominator.

    A token or response whose ratio or divergence is NaN is out of bounds.

    Source: Liu et al. 2025, "When speed kills stability", for the ratio of a response and its geometric mean.

    Raises:
        ValueError: the log-probabilities of the engine are missing.
    """
    if rejection is None:
        return inputs
    log_ratio = rollout_log_ratios(inputs)
    if isinstance(rejection, RatioBounds):
        value = _at_level(log_ratio, inputs, rejection.level)
        lower = math.log(rejection.lower) if rejection.lower else -math.inf
        kept = (value >= lower) & (value <= math.log(rejection.upper))
    else:
        estimates = kl_estimate(torch.zeros_like(log_ratio), log_ratio, rejection.estimator)
        kept = _at_level(estimates, inputs, rejection.level) <= rejection.upper
    return replace(inputs, mask_N=inputs.mask_N * kept)


def rollout_log_ratios(inputs: LossInputs) -> torch.Tensor:
    """[N] old_log_probs - rollout_log_probs, 0 outside the mask, without gradient.

    Raises:
        ValueError: the log-probabilities of the engine are missing.
    """
    if inputs.rollout_log_probs_N is None:
        raise ValueError(
            "a rollout correction or rejection needs rollout_log_probs; have the engine give them, or set "
            "algorithm.rollout_correction.type to none and algorithm.rollout_rejection to null"
        )
    # No value outside the mask, not even NaN, may reach the loss or the metrics.
    return torch.where(inputs.mask_N > 0, inputs.old_log_probs_N - inputs.rollout_log_probs_N, 0.0).detach()


def _at_level(values_N: torch.Tensor, inputs: LossInputs, level: RatioLevel) -> torch.Tensor:
    """[N] the values of tokens themselves, or their mean or sum over the response of each; 0 outside the mask."""
    if level == "token":
        return values_N
    of_sample = inputs.sums_S(values_N)
    if level == "geometric":
        of_sample = of_sample / inputs.sums_S(inputs.mask_N).clamp(min=1)
    return torch.where(inputs.mask_N > 0, of_sample[inputs.sample_N], 0.0)
