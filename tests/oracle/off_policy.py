"""Corrections for tokens that other weights sampled."""

from types import ModuleType

import torch

from tailrace.algorithms.off_policy import importance_weights
from tailrace.config.algorithm import TruncatedCorrection
from tests.helpers.responses import Responses
from tests.oracle.entry import Entry


def weights(responses: Responses) -> torch.Tensor:
    """Return [B, R]: our weights, 0 outside the mask as verl's are."""
    factors = importance_weights(responses.packed, TruncatedCorrection(limit=responses.limit))
    return responses.padded(factors.weight_N) * responses.mask_BR


def verls_weights(verl: ModuleType, responses: Responses) -> torch.Tensor:
    """Return [B, R]: verl's weights."""
    weights_BR: torch.Tensor
    weights_BR, _metrics = verl.rollout_corr_helper.compute_rollout_correction_weights(
        responses.old_log_probs_BR - responses.columns_BR["rollout_log_probs"],
        responses.mask_BR,
        rollout_is="token",
        rollout_is_threshold=responses.limit,
    )
    return weights_BR


ENTRIES = (
    Entry(
        name="importance_weights",
        ours=weights,
        verls=verls_weights,
        differs="weights outside the mask are 1 here, 0 in verl; verl clamps log-ratios to 20, which no case reaches",
    ),
)
