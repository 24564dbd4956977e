"""Policy losses with each surrogate, and the ways to aggregate them."""

from collections.abc import Callable
from functools import partial
from types import ModuleType

import torch

from tailrace.algorithms.loss_inputs import LossInputs
from tailrace.algorithms.losses import aggregate, policy_loss
from tailrace.algorithms.surrogates import Surrogate, clipped, sequence_clipped, weight_clipped
from tailrace.config.algorithm import KlConfig, NoCorrection, TruncatedCorrection
from tests.helpers.responses import Responses
from tests.oracle.entry import Entry
from tests.oracle.kl import K3_CLAMPS, verls_kl
from tests.oracle.off_policy import verls_weights

ADDS = "verl adds 1e-8 to a number of tokens before it divides by it"
CLAMPS = "verl's bound of log-ratios is 20, for GSPO 10 and above alone, and no case reaches either"
NO_DUAL_CLIP = 1e9
"""verl bounds the loss of a negative advantage by this multiple of it, and has no switch for that."""


def policy(
    responses: Responses,
    surrogate: Callable[..., Surrogate],
    *,
    has_kl: bool = False,
    has_correction: bool = False,
) -> torch.Tensor:
    """Return our loss and the fraction of tokens that are clipped, [2]."""
    inputs: LossInputs = responses.packed
    output = policy_loss(
        inputs,
        partial(surrogate, clip_low=responses.clip_low, clip_high=responses.clip_high),
        mode=responses.mode,
        kl=KlConfig(coefficient=responses.kl_coefficient if has_kl else 0.0, estimator=responses.estimator),
        correction=TruncatedCorrection(limit=responses.limit) if has_correction else NoCorrection(),
        norm_tokens=responses.norm_tokens,
    )
    loss, sums = output.loss_sum / output.denominator, output.metrics
    clipped_tokens = sums["clip_fraction_low"] + sums["clip_fraction_high"]
    return torch.stack([loss, loss.new_tensor(clipped_tokens / sums["tokens"])])


def verls_policy(
    verl: ModuleType, responses: Responses, name: str, *, has_kl: bool = False, has_correction: bool = False
) -> torch.Tensor:
    """Return the same of the loss that verl calls `name`; a penalty is added as verl's actor does."""
    config = verl.core_algos.ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        use_dynamic_bsz=True,
        clip_ratio_low=responses.clip_low,
        clip_ratio_high=responses.clip_high,
        clip_ratio_c=NO_DUAL_CLIP,
        global_batch_info={"loss_scale_factor": responses.norm_tokens},
    )
    loss, metrics = verl.core_algos.get_policy_loss_fn(name)(
        old_log_prob=responses.old_log_probs_BR,
        log_prob=responses.log_probs_BR,
        advantages=responses.columns_BR["advantages"],
        response_mask=responses.mask_BR,
        loss_agg_mode=responses.mode,
        config=config,
        rollout_is_weights=verls_weights(verl, responses) if has_correction else None,
    )
    if has_kl:
        penalty_BR = verls_kl(verl, responses, responses.log_probs_BR, responses.estimator)
        loss = loss + responses.kl_coefficient * verls_mean(verl, responses, penalty_BR)
    return torch.stack([loss, loss.new_tensor(metrics["actor/pg_clipfrac"])])


def mean(responses: Responses) -> torch.Tensor:
    """Return our aggregate of numbers, which the log-probabilities serve for."""
    inputs = responses.packed
    loss_sum, denominator = aggregate(inputs.log_probs_N, inputs, responses.mode, responses.norm_tokens)
    return loss_sum / denominator


def verls_mean(verl: ModuleType, responses: Responses, values_BR: torch.Tensor) -> torch.Tensor:
    """Return verl's aggregate of numbers."""
    aggregated: torch.Tensor = verl.core_algos.agg_loss(
        values_BR, responses.mask_BR, responses.mode, loss_scale_factor=responses.norm_tokens
    )
    return aggregated


ENTRIES = (
    Entry(
        name="aggregate",
        ours=mean,
        verls=lambda verl, responses: verls_mean(verl, responses, responses.log_probs_BR),
        differs=ADDS,
    ),
    Entry(
        name="clipped policy_loss",
        ours=partial(policy, surrogate=clipped),
        verls=partial(verls_policy, name="vanilla"),
        differs=f"{ADDS}; {CLAMPS}",
    ),
    Entry(
        name="clipped policy_loss with KL penalty",
        ours=partial(policy, surrogate=clipped, has_kl=True),
        verls=partial(verls_policy, name="vanilla", has_kl=True),
        differs=f"{ADDS}; {CLAMPS}; {K3_CLAMPS}",
    ),
    Entry(
        name="clipped policy_loss with truncated importance",
        ours=partial(policy, surrogate=clipped, has_correction=True),
        verls=partial(verls_policy, name="vanilla", has_correction=True),
        differs=f"{ADDS}; {CLAMPS}",
    ),
    Entry(
        name="sequence_clipped policy_loss (GSPO)",
        ours=partial(policy, surrogate=sequence_clipped),
        verls=partial(verls_policy, name="gspo"),
        differs=f"{ADDS}; {CLAMPS}",
        holds_constant=True,
    ),
    Entry(
        name="weight_clipped policy_loss (CISPO)",
        ours=partial(policy, surrogate=weight_clipped),
        verls=partial(verls_policy, name="cispo"),
        differs=f"{ADDS}; {CLAMPS}",
        holds_constant=True,
    ),
)
