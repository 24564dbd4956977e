"""The loss of a critic."""

import torch

from tailrace.algorithms.loss_inputs import LossInputs, LossOutput
from tailrace.algorithms.losses import masked_sum


def value_loss(inputs: LossInputs, *, clip: float | None) -> LossOutput:
    """Compute max((V - R)², (V' - R)²) / 2 of each token, and its mean over tokens.

    V is the value, R the return (column `returns`). V' is V within `clip` of the value that the advantages were
    computed with (column `values`). `clip` None: (V - R)² / 2.

    Source: Schulman et al. 2017; the clipping, Engstrom et al. 2020, "Implementation Matters", section 3.

    The metrics are sums over the tokens of the mask: `value_loss`, `value`, `value_clip_fraction`, and what
    `explained_variance` needs.
    """
    trained = inputs.mask_N > 0
    values, returns, before = (
        torch.where(trained, each, 0.0)
        for each in (inputs.log_probs_N, inputs.columns_N["returns"], inputs.columns_N["values"])
    )
    errors = (values - returns).square()
    clipped = torch.zeros_like(trained)
    loss = errors
    if clip is not None:
        # A value within the bounds stays exactly what it is, so that rounding does not make it count as clipped.
        bounded = (values.clamp(before - clip, before + clip) - returns).square()
        loss, clipped = torch.maximum(errors, bounded), bounded > errors
    loss = loss / 2
    per_token = {
        "tokens": torch.ones_like(loss),
        "value_loss": loss,
        "value": values,
        "value_clip_fraction": clipped,
        **{name: each for name, each in zip(_MOMENTS, _moments(before, returns), strict=True)},
    }
    metrics = {name: masked_sum(value.detach(), inputs.mask_N).item() for name, value in per_token.items()}
    return LossOutput(loss_sum=masked_sum(loss, inputs.mask_N), denominator=inputs.mask_N.sum().item(), metrics=metrics)


_MOMENTS = ("return", "return_square", "value_error", "value_error_square")


def _moments(values: torch.Tensor, returns: torch.Tensor) -> tuple[torch.Tensor, ...]:
    errors = returns - values
    return returns, returns.square(), errors, errors.square()


def with_explained_variance(means: dict[str, float]) -> dict[str, float]:
    """Replace the moments among the means of a critic's metrics by `explained_variance`.

    It is 1 - Var(R - V) / Var(R) over the step's tokens, for the values that the advantages were computed with. 1 is
    a perfect critic, and 0 one that knows nothing. Without a variance of returns it is left out.
    """
    if not set(_MOMENTS) <= means.keys():
        return means
    mean, square, error, error_square = (means[name] for name in _MOMENTS)
    others = {name: value for name, value in means.items() if name not in _MOMENTS[1:]}
    variance = square - mean**2
    if variance <= 1e-12:
        return others
    return others | {"explained_variance": 1 - (error_square - error**2) / variance}
