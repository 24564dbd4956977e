"""How far the tokens of a batch are off the policy that is trained: measured for every loss, whatever it corrects.

Two things set the engine's log-probabilities of a token apart from the trainer's at the start of the step. The engine
computes in another way, and it may have held older weights. `rollout_…` is both, over all tokens. `on_policy_…` is the
first alone, over the responses that the weights of the step have made.
"""

import torch

from tailrace.algorithms.kl import kl_estimate
from tailrace.algorithms.loss_inputs import LossInputs, is_maximum
from tailrace.algorithms.off_policy import rollout_log_ratios
from tailrace.algorithms.surrogates import MOST_LOG_RATIO


def mismatch(inputs: LossInputs, trained_N: torch.Tensor) -> dict[str, float]:
    """Measure the batch before anything is rejected. `tailrace.algorithms.figures` makes figures of these sums.

    `trained_N`: the mask of `inputs` itself, or a copy without what is rejected. The latter is counted then.

    Returns nothing without the log-probabilities of the engine.
    """
    if inputs.rollout_log_probs_N is None:
        return {}
    mask_N = inputs.mask_N
    log_ratio = rollout_log_ratios(inputs)
    ratio = torch.where(mask_N > 0, log_ratio.clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO).exp(), 0.0)
    per_token = {
        "measured_tokens": mask_N,
        **_distances("rollout", inputs, mask_N),
        "rollout_ratio": ratio,
        "rollout_ratio_squared": ratio.square(),
    }
    if (overflow := log_ratio.abs() > MOST_LOG_RATIO).any():
        per_token["rollout_overflow"] = overflow
    if inputs.on_policy_N is not None:
        on_policy_N = mask_N * inputs.on_policy_N
        per_token |= {"on_policy": on_policy_N, **_distances("on_policy", inputs, on_policy_N)}
    if trained_N is not mask_N:
        samples_S, trained_S = inputs.sums_S(mask_N) > 0, inputs.sums_S(trained_N) > 0
        per_token |= {
            "rejected_tokens": mask_N - trained_N,
            "measured_samples": samples_S,
            "rejected_samples": samples_S & ~trained_S,
        }
    largest = {name: values for name, values in per_token.items() if is_maximum(name)}
    return {
        **{name: float(values.sum()) for name, values in per_token.items() if name not in largest},
        **{name: float(values.max()) if len(values) else 0.0 for name, values in largest.items()},
    }


def _distances(of: str, inputs: LossInputs, counted_N: torch.Tensor) -> dict[str, torch.Tensor]:
    """[N] each, 0 where `counted_N` is 0: distances of the two distributions, by the name of the metric."""
    assert inputs.rollout_log_probs_N is not None
    old, rollout = (
        torch.where(counted_N > 0, values.detach(), 0.0)
        for values in (inputs.old_log_probs_N, inputs.rollout_log_probs_N)
    )
    probs_diff = (old.exp() - rollout.exp()).abs()
    return {
        f"{of}_mismatch": (old - rollout).abs(),
        f"{of}_kl": kl_estimate(rollout, old, "k3"),
        f"{of}_probs_diff_mean": probs_diff,
        f"{of}_probs_diff_squared": probs_diff.square(),
        f"{of}_probs_diff_max": probs_diff,
    }
