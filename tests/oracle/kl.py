"""Estimates of the KL divergence at each token."""

from types import ModuleType

import torch

from tailrace.algorithms.kl import kl_estimate
from tailrace.config.algorithm import KlEstimator
from tests.helpers.responses import ESTIMATORS, Responses
from tests.oracle.entry import Entry

K3_CLAMPS = "verl clamps k3's log-ratio to 20 and its estimate to 10, which no case reaches"


def verls_kl(
    verl: ModuleType, responses: Responses, log_probs_BR: torch.Tensor, estimator: KlEstimator
) -> torch.Tensor:
    """Return [B, R]: verl's estimates for these log-probabilities of the policy."""
    estimate_BR: torch.Tensor = verl.core_algos.kl_penalty(
        log_probs_BR, responses.columns_BR["ref_log_probs"], estimator
    )
    return estimate_BR


def entry(estimator: KlEstimator) -> Entry:
    """The estimates and their gradient."""

    def ours(responses: Responses) -> torch.Tensor:
        return kl_estimate(responses.log_probs_BR, responses.columns_BR["ref_log_probs"], estimator)

    def verls(verl: ModuleType, responses: Responses) -> torch.Tensor:
        return verls_kl(verl, responses, responses.log_probs_BR, estimator)

    name = f"kl_estimate {estimator}"
    return Entry(name=name, ours=ours, verls=verls, differs=K3_CLAMPS if estimator == "k3" else "")


ENTRIES = tuple(map(entry, ESTIMATORS))
