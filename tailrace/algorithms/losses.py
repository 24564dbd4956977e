"""The policy loss of packed response tokens, and its aggregation to one number."""

from collections.abc import Callable, Mapping

import torch

from tailrace.algorithms.kl import kl_estimate
from tailrace.algorithms.loss_inputs import LossInputs, LossOutput
from tailrace.algorithms.mismatch import mismatch
from tailrace.algorithms.off_policy import importance_weights, without_rejected
from tailrace.algorithms.surrogates import MOST_LOG_RATIO, Surrogate
from tailrace.config.algorithm import KlConfig, LossAggMode, RolloutCorrection, RolloutRejection


def policy_loss(
    inputs: LossInputs,
    surrogate: Callable[[LossInputs], Surrogate],
    *,
    mode: LossAggMode,
    kl: KlConfig,
    correction: RolloutCorrection,
    rejection: RolloutRejection | None = None,
    norm_tokens: int | None = None,
) -> LossOutput:
    """The surrogate, times the correction's weights, plus the KL penalty, token by token, then aggregated.

    What is rejected is taken out of the mask before all else. `norm_tokens`: see `aggregate`.

    The metrics are those of `mismatch`, which also counts what is rejected, and sums over the tokens trained on:

        always                       `tokens`, `policy_loss`, `ratio`, `clip_fraction_low`, `clip_fraction_high`,
                                     `approx_kl` (k3 of the old weights and the current ones)
        with a ratio beyond e^±20    `ratio_overflow`, the tokens where it is bounded
        with a penalty               `ref_kl`; `kl_coefficient` where it is adaptive
        with a weighting correction  `correction_weight`, its square, and `correction_truncated` or `correction_masked`
    """
    trained = without_rejected(inputs, rejection)
    tokens = surrogate(trained)
    per_token = _of_surrogate(tokens)
    loss = tokens.loss_N
    if correction.type != "none":
        weights = importance_weights(trained, correction)
        loss = loss * weights.weight_N
        per_token |= {
            "correction_weight": weights.weight_N,
            "correction_weight_squared": weights.weight_N.square(),
            f"correction_{correction.type}": weights.bounded_N,
        }
    if kl.coefficient:
        per_token["ref_kl"] = reference_kl(trained, kl)
        coefficient: float | torch.Tensor = kl.coefficient
        if kl.adaptive is not None:
            coefficient = per_token["kl_coefficient"] = trained.columns_N["kl_coefficient"]
        if kl.part_of == "loss":
            loss = loss + coefficient * per_token["ref_kl"]
    loss_sum, denominator = aggregate(loss, trained, mode, norm_tokens)
    metrics = {**_sums(per_token, trained.mask_N), **mismatch(inputs, trained.mask_N)}
    return LossOutput(loss_sum=loss_sum, denominator=denominator, metrics=metrics)


def _of_surrogate(tokens: Surrogate) -> dict[str, torch.Tensor]:
    """[N] each, by the name of the metric."""
    log_ratio = tokens.log_ratio_N.detach()
    found = {
        "tokens": torch.ones_like(tokens.loss_N),
        "policy_loss": tokens.loss_N,
        "ratio": tokens.ratio_N,
        "clip_fraction_low": tokens.clipped_low_N,
        "clip_fraction_high": tokens.clipped_high_N,
        "approx_kl": kl_estimate(torch.zeros_like(log_ratio), log_ratio, "k3"),
    }
    if (overflow := log_ratio.abs() > MOST_LOG_RATIO).any():
        found["ratio_overflow"] = overflow
    return found


def _sums(per_token: Mapping[str, torch.Tensor], mask_N: torch.Tensor) -> dict[str, float]:
    return {name: masked_sum(value.detach(), mask_N).item() for name, value in per_token.items()}


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
    tokens_S = inputs.sums_S(mask)
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
