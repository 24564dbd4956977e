"""The policy loss of packed response tokens, and its aggregation to one number."""

import torch

from tailrace.algorithms.kl import kl_estimate
from tailrace.algorithms.loss_inputs import LossInputs, LossOutput
from tailrace.algorithms.off_policy import truncated_importance
from tailrace.algorithms.surrogates import MOST_LOG_RATIO, Surrogate
from tailrace.config.algorithm import KlConfig, LossAggMode, RolloutCorrection


def policy_loss(
    inputs: LossInputs,
    surrogate: Surrogate,
    *,
    mode: LossAggMode,
    kl: KlConfig,
    correction: RolloutCorrection,
    norm_tokens: int | None = None,
) -> LossOutput:
    """The surrogate, times the correction, plus the KL penalty, token by token, then aggregated.

    `norm_tokens`: see `aggregate`.

    The metrics are sums over the N tokens of the mask:

        always                              `tokens`, `policy_loss`, `ratio`, `clip_fraction_low`, `clip_fraction_high`,
                                            `approx_kl` (k3 of the old weights and the current ones)
        with a ratio beyond e^±20           `ratio_overflow`, the tokens where it is bounded
        with a penalty                      `ref_kl`
        with the engine's log-probabilities `rollout_mismatch`, the distance of the old log-probabilities from them
        and where `on_policy_N` is known    `on_policy`, `on_policy_mismatch` (that distance on on-policy tokens)
        with a correction                   `correction_weight`, `correction_truncated`
    """
    log_ratio = surrogate.log_ratio_N
    per_token = {
        "tokens": torch.ones_like(surrogate.loss_N),
        "policy_loss": surrogate.loss_N,
        "ratio": surrogate.ratio_N,
        "clip_fraction_low": surrogate.clipped_low_N,
        "clip_fraction_high": surrogate.clipped_high_N,
        "approx_kl": kl_estimate(torch.zeros_like(log_ratio), log_ratio, "k3"),
    }
    if (overflow := log_ratio.abs() > MOST_LOG_RATIO).any():
        per_token["ratio_overflow"] = overflow
    loss = surrogate.loss_N
    if correction.type == "truncated":
        factors = truncated_importance(inputs, limit=correction.limit)
        per_token |= {"correction_weight": factors.weight_N, "correction_truncated": factors.truncated_N}
        loss = loss * factors.weight_N
    if kl.coefficient:
        per_token["ref_kl"] = reference_kl(inputs, kl)
        if kl.part_of == "loss":
            loss = loss + kl.coefficient * per_token["ref_kl"]
    loss_sum, denominator = aggregate(loss, inputs, mode, norm_tokens)
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


def aggregate(
    loss_N: torch.Tensor, inputs: LossInputs, mode: LossAggMode, norm_tokens: int | None = None
) -> tuple[torch.Tensor, float]:
    """Sum token losses; return the sum and the denominator to divide it by, over the whole batch.

    token-mean                sum over tokens                          / tokens
    seq-mean-token-mean       sum over samples of their token mean     / samples
    seq-mean-token-sum        sum over samples of their token sum      / samples
    seq-mean-token-sum-norm   the same                                 / (samples * norm_tokens)

    Only tokens of the mask count, and samples that have any.
    Source: token-mean: DAPO, section 3.3; seq-mean-token-mean: GRPO, equation 3; the last one, with the longest
    response as `norm_tokens`: Dr. GRPO, Liu et al. 2025, section 3.2.

    Raises:
        ValueError: `seq-mean-token-sum-norm` without `norm_tokens`.
    """
    mask = inputs.mask_N
    if mode == "token-mean":
        return masked_sum(loss_N, mask), mask.sum().item()
    tokens_S = mask.new_zeros(inputs.samples).index_add_(0, inputs.sample_N, mask)
    samples = float((tokens_S > 0).sum())
    if mode == "seq-mean-token-sum":
        return masked_sum(loss_N, mask), samples
    if mode == "seq-mean-token-sum-norm":
        if norm_tokens is None:
            raise ValueError(
                "algorithm.loss_agg_mode seq-mean-token-sum-norm needs a number to divide by; give "
                "algorithm.loss_norm_tokens, such as sampling.max_new_tokens"
            )
        return masked_sum(loss_N, mask), samples * norm_tokens
    weights = mask / tokens_S.clamp(min=1)[inputs.sample_N]
    return masked_sum(loss_N, weights), samples


def masked_sum(values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Compute sum(values * weights), where a value of weight 0 adds nothing even if it is NaN."""
    return torch.where(weights > 0, values * weights, 0.0).sum()
