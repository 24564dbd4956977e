"""The loss of a critic."""

from functools import partial
from types import ModuleType

import torch

from tailrace.algorithms.value_loss import value_loss
from tests.helpers.responses import Responses
from tests.oracle.entry import Entry
from tests.oracle.losses import ADDS

FAR = 1e6
"""No value is so far from the one before: verl has no switch for its clipping."""


def value(responses: Responses, *, is_clipped: bool) -> torch.Tensor:
    """Return our loss and the fraction of values that are clipped, [2]."""
    output = value_loss(responses.packed, clip=responses.value_clip if is_clipped else None)
    loss, sums = output.loss_sum / output.denominator, output.metrics
    return torch.stack([loss, loss.new_tensor(sums["value_clip_fraction"] / sums["tokens"])])


def verls_value(verl: ModuleType, responses: Responses, *, is_clipped: bool) -> torch.Tensor:
    """Return the same of verl's loss."""
    loss, clip_fraction = verl.core_algos.compute_value_loss(
        vpreds=responses.log_probs_BR,
        returns=responses.columns_BR["returns"],
        values=responses.columns_BR["values"],
        response_mask=responses.mask_BR,
        cliprange_value=responses.value_clip if is_clipped else FAR,
    )
    return torch.stack([loss, clip_fraction])


ENTRIES = tuple(
    Entry(
        name=f"value_loss{' clipped' if is_clipped else ''}",
        ours=partial(value, is_clipped=is_clipped),
        verls=partial(verls_value, is_clipped=is_clipped),
        differs=f"{ADDS}; ours is always the mean over tokens",
    )
    for is_clipped in (False, True)
)
