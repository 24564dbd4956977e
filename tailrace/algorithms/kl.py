"""Per-token estimators of KL(policy || reference) from one sampled token.

Source: Schulman 2020, "Approximating KL divergence", http://joschu.net/blog/kl-approx.html. With r = reference(token) /
policy(token) for a token drawn from the policy:

    k1 = -log r             unbiased, can be negative
    k2 = (log r)² / 2       biased, low variance
    k3 = (r - 1) - log r    unbiased, never negative

This describes them as estimates of the value. Gradients of a penalty differ (Tang & Munos 2025, "On a few pitfalls in
KL divergence gradient estimation for RL"). In the mean, the gradient of k1 is 0, that of k2 is the gradient of
KL(policy || reference), and that of k3 is the gradient of KL(reference || policy). k3 would overflow where the policy
has made a token nearly impossible; beyond e^20 it is constant.
"""

import torch

from tailrace.algorithms.surrogates import MOST_LOG_RATIO
from tailrace.config.algorithm import KlEstimator


def kl_estimate(log_probs: torch.Tensor, ref_log_probs: torch.Tensor, estimator: KlEstimator) -> torch.Tensor:
    """The estimate of each token, differentiable in `log_probs`, in the shape of the arguments."""
    log_r = ref_log_probs - log_probs
    match estimator:
        case "k1":
            return -log_r
        case "k2":
            return log_r.square() / 2
        case "k3":
            bounded = log_r.clamp(max=MOST_LOG_RATIO)
            return bounded.expm1() - bounded
