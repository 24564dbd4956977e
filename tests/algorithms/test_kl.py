import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tailrace.algorithms.kl import kl_estimate
from tailrace.config.algorithm import KlEstimator

log_prob = st.floats(-8, 0)
POLICY = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
REFERENCE = torch.tensor([0.3, 0.4, 0.1, 0.2], dtype=torch.float64)
TRUE_KL = float((POLICY * (POLICY / REFERENCE).log()).sum())


def estimate(policy: float, reference: float, estimator: KlEstimator) -> float:
    one, other = (torch.tensor([value], dtype=torch.float64) for value in (policy, reference))
    return kl_estimate(one, other, estimator).item()


@given(log_prob, log_prob)
def test_estimators_equal_their_formulas(policy: float, reference: float) -> None:
    ratio = math.exp(reference - policy)
    assert estimate(policy, reference, "k1") == pytest.approx(policy - reference)
    assert estimate(policy, reference, "k2") == pytest.approx((policy - reference) ** 2 / 2)
    assert estimate(policy, reference, "k3") == pytest.approx(ratio - 1 - (reference - policy), abs=1e-9)
    assert estimate(policy, reference, "k3") >= 0


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_k1_and_k3_are_unbiased(estimator: KlEstimator) -> None:
    values = kl_estimate(POLICY.log(), REFERENCE.log(), estimator)
    assert float((POLICY * values).sum()) == pytest.approx(TRUE_KL)


@pytest.mark.parametrize(("estimator", "slope"), [("k1", 1.0), ("k2", 0.5), ("k3", 1 - math.exp(-0.5))])
def test_gradients_flow_into_the_policy(estimator: KlEstimator, slope: float) -> None:
    policy = torch.tensor([-1.0], requires_grad=True)
    kl_estimate(policy, torch.tensor([-1.5]), estimator).backward()  # type: ignore[no-untyped-call]
    assert policy.grad is not None
    assert policy.grad.item() == pytest.approx(slope)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_mean_gradients_are_nothing_the_gradient_of_the_kl_and_that_of_the_reverse_kl(estimator: KlEstimator) -> None:
    logits = POLICY.log().requires_grad_()
    log_probs = logits.log_softmax(0)
    objective = {
        "k1": log_probs.sum() * 0,
        "k2": (log_probs.exp() * (log_probs - REFERENCE.log())).sum(),
        "k3": (REFERENCE * (REFERENCE.log() - log_probs)).sum(),
    }[estimator]
    mean = (POLICY * kl_estimate(log_probs, REFERENCE.log(), estimator)).sum()
    expected, found = (torch.autograd.grad(value, logits, retain_graph=True)[0] for value in (objective, mean))
    torch.testing.assert_close(found, expected)


def test_k3_keeps_its_precision_near_zero() -> None:
    value = kl_estimate(torch.tensor([-1.0]), torch.tensor([-1.0 + 2**-10]), "k3").item()
    assert value == pytest.approx(2**-21, rel=2e-3)
