"""Policy losses of packed response tokens, and their aggregation to one number."""

from dataclasses import dataclass

import torch

from tailrace.algorithms.kl import kl_estimate
from tailrace.algorithms.loss_inputs import LossInputs, LossOutput
from tailrace.algorithms.off_policy import truncated_importance
from tailrace.config.algorithm import KlConfig, LossAggMode, RolloutCorrection


@dataclass(frozen=True, slots=True, kw_only=True)
class ClippedTokens:
    """The clipped surrogate of each token. Tokens outside the mask have ratio 1 and no gradient."""

    loss_N: torch.Tensor
    ratio_N: torch.Tensor
    log_ratio_N: torch.Tensor
    clipped_low_N: torch.Tensor
    """bool: the bound below 1 replaced the ratio, so the token has no gradient."""
    clipped_high_N: torch.Tensor
    """bool: the bound above 1 replaced the ratio."""


def clipped_surrogate(inputs: LossInputs, *, clip_low: float, clip_high: float) -> ClippedTokens:
    """Compute -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A), ratio = exp(log_probs - old_log_probs).

    Source: PPO, Schulman et al. 2017, equation 7. The bound above may be larger than the one below: clip-higher, DAPO,
    Yu et al. 2025, section 3.1.
    """
    advantages = inputs.advantages_N
    # No value outside the mask, not even NaN, may reach the loss or the gradient.
    log_ratio = torch.where(inputs.mask_N > 0, inputs.log_probs_N - inputs.old_log_probs_N, 0.0)
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    return ClippedTokens(
        loss_N=-torch.minimum(ratio * advantages, clipped * advantages),
        ratio_N=ratio,
        log_ratio_N=log_ratio,
        clipped_low_N=(ratio < 1 - clip_low) & (advantages < 0),
        clipped_high_N=(ratio > 1 + clip_high) & (advantages > 0),
    )


def clipped_policy_loss(
    inputs: LossInputs,
    *,
    clip_low: float,
    clip_high: float,
    mode: LossAggMode,
    kl: KlConfig,
    correction: RolloutCorrection,
) -> LossOutput:
    """The clipped surrogate, times the correction, plus the KL penalty, token by token, then aggregated.

    The metrics are sums over the N tokens of the mask:

        always                              `tokens`, `policy_loss`, `ratio`, `clip_fraction_low`, `clip_fraction_high`,
                                            `approx_kl` (k3 of the old weights and the current ones)
        with a penalty                      `ref_kl`
        with the engine's log-probabilities `rollout_mismatch`, the distance of the old log-probabilities from them
        and where `on_policy_N` is known    `on_policy`, `on_policy_mismatch` (that distance on on-policy tokens)
        with a correction                   `correction_weight`, `correction_truncated`
    """
    tokens = clipped_surrogate(inputs, clip_low=clip_low, clip_high=clip_high)
    per_token = {
        "tokens": torch.ones_like(tokens.loss_N),
        "policy_loss": tokens.loss_N,
        "ratio": tokens.ratio_N,
        "clip_fraction_low": tokens.clipped_low_N,
        "clip_fraction_high": tokens.clipped_high_N,
        "approx_kl": kl_estimate(torch.zeros_like(tokens.log_ratio_N), tokens.log_ratio_N, "k3"),
    }
    loss = tokens.loss_N
    if correction.type == "truncated":
        factors = truncated_importance(inputs, limit=correction.limit)
        per_token |= {"correction_weight": factors.weight_N, "correction_truncated": factors.truncated_N}
        loss = loss * factors.weight_N
    if kl.coefficient:
        per_token["ref_kl"] = reference_kl(inputs, kl)
        loss = loss + kl.coefficient * per_token["ref_kl"]
    loss_sum, denominator = aggregate(loss, inputs, mode)
    if inputs.rollout_log_probs_N is not None:
        mismatch = (inputs.old_log_probs_N - inputs.rollout_log_probs_N).abs()
        per_token["rollout_mismatch"] = mismatch
        if inputs.on_policy_N is not None:
            per_token["on_policy"] = inputs.on_policy_N
            per_token["on_policy_mismatch"] = torch.where(inputs.on_policy_N > 0, mismatch, 0.0)
    metrics = {name: masked_sum(value.detach(), inputs.mask_N).item() for name, value in per_token.items()}
    return LossOutput(loss_sum=loss_sum, denominator=denominator, metrics=metrics)


def reference_kl(inputs: LossInputs, kl: KlConfig) -> torch.Tensor:
    """[N] estimates of KL(policy || reference) at each token, 0 outside the mask."""
    if inputs.ref_log_probs_N is None:
        raise ValueError("a KL penalty needs ref_log_probs; compute them or set algorithm.kl.coefficient to 0")
    trained = inputs.mask_N > 0
    reference = torch.where(trained, inputs.ref_log_probs_N, 0.0)
    return kl_estimate(torch.where(trained, inputs.log_probs_N, 0.0), reference, kl.estimator)


def aggregate(loss_N: torch.Tensor, inputs: LossInputs, mode: LossAggMode) -> tuple[torch.Tensor, float]:
    """Sum token losses; return the sum and the denominator to divide it by, over the whole batch.

    token-mean              sum over tokens                            / tokens
    seq-mean-token-mean     sum over samples of their token mean       / samples
    seq-mean-token-sum      sum over samples of their token sum        / samples

    Only tokens of the mask count, and samples that have any.
    Source: token-mean: DAPO, section 3.3; seq-mean-token-mean: GRPO, equation 3.
    """
    mask = inputs.mask_N
    if mode == "token-mean":
        return masked_sum(loss_N, mask), mask.sum().item()
    tokens_S = mask.new_zeros(inputs.samples).index_add_(0, inputs.sample_N, mask)
    samples = float((tokens_S > 0).sum())
    if mode == "seq-mean-token-sum":
        return masked_sum(loss_N, mask), samples
    weights = mask / tokens_S.clamp(min=1)[inputs.sample_N]
    return masked_sum(loss_N, weights), samples


def masked_sum(values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Compute sum(values * weights), where a value of weight 0 adds nothing even if it is NaN."""
    return torch.where(weights > 0, values * weights, 0.0).sum()
