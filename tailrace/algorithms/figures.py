"""The figures of a training step, from the metrics of its optimizer steps.

A trainer adds up the metrics of a loss and divides them by `tokens`, so they become means over the tokens trained on.
Some figures need more: a mean over other tokens, a deviation, an effective sample size. For these a loss gives sums
(`tailrace.algorithms.mismatch`), which are added up over the whole step here.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

from tailrace.algorithms.loss_inputs import is_maximum

_DISTANCES = ("mismatch", "kl", "probs_diff_mean", "probs_diff_squared")
_DIVIDED_BY = {
    **{f"rollout_{name}": "measured_tokens" for name in (*_DISTANCES, "overflow", "ratio", "ratio_squared")},
    **{f"on_policy_{name}": "on_policy" for name in _DISTANCES},
    "on_policy": "measured_tokens",
    "rejected_tokens": "measured_tokens",
    "rejected_samples": "measured_samples",
    "correction_weight": "tokens",
    "correction_weight_squared": "tokens",
}
"""What each sum is divided by, once it is that of the whole step."""
_COUNTS = ("measured_tokens", "measured_samples")


def step_figures(
    applied: Sequence[Mapping[str, float]], untrained: Sequence[Mapping[str, float]] = ()
) -> dict[str, float]:
    """Compute the figures of a step.

    Args:
        applied: the metrics of each optimizer step: means over its `tokens`, and maxima, whose names end with `_max`.
        untrained: sums of those that had no token left to train on. They tell what there was before.
    """
    sums = [{name: value * update.get("tokens", 1.0) for name, value in update.items()} for update in applied]
    totals = {name: math.fsum(values) for name, values in _by_name([*sums, *untrained]).items()}
    totals["tokens"] = math.fsum(update.get("tokens", 1.0) for update in applied)
    pooled = {
        name: totals[name] / totals[count]
        for name, count in _DIVIDED_BY.items()
        if name in totals and totals.get(count, 0.0)
    }
    largest = {name: max(values) for name, values in _by_name([*applied, *untrained]).items() if is_maximum(name)}
    means = {name: statistics.fmean(values) for name, values in _by_name(applied).items()}
    others = {name: mean for name, mean in means.items() if name not in (*_DIVIDED_BY, *_COUNTS, *largest)}
    return {**others, **largest, **_derived(pooled)}


def _by_name(updates: Iterable[Mapping[str, float]]) -> dict[str, list[float]]:
    """The values of each metric; a loss may have some only now and then."""
    found: dict[str, list[float]] = {}
    for update in updates:
        for name, value in update.items():
            found.setdefault(name, []).append(value)
    return found


def _derived(means: Mapping[str, float]) -> dict[str, float]:
    """Put deviations and an effective sample size in the place of mean squares.

    The latter is (mean of w)² / mean of w², of the weights w of tokens, or else of the ratios that would be weights.
    """
    found = {name: mean for name, mean in means.items() if not name.endswith("_squared") and name != "rollout_ratio"}
    for name in ("rollout_probs_diff", "on_policy_probs_diff"):
        if (square := means.get(f"{name}_squared")) is not None:
            found[f"{name}_std"] = math.sqrt(max(square - means[f"{name}_mean"] ** 2, 0.0))
    weight = "correction_weight" if "correction_weight" in means else "rollout_ratio"
    if square := means.get(f"{weight}_squared"):
        found["effective_sample_size"] = means[weight] ** 2 / square
    return found
