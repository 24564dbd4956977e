"""What DAPO has beyond GRPO, by hand."""

import math

import numpy as np
import pytest
import torch

from tailrace.algorithms.dapo import Dapo, has_no_signal
from tailrace.algorithms.factory import make_algorithm
from tailrace.algorithms.loss_inputs import LossInputs
from tailrace.algorithms.table import Cells, Compute
from tailrace.config.algorithm import AdaptiveKl, DapoConfig, DynamicSamplingConfig, KlConfig, OverlongConfig


def dapo(overlong: OverlongConfig | None = None) -> Dapo:
    config = DapoConfig(group_size=2, overlong=overlong or OverlongConfig())
    made = make_algorithm(config.resolved(max_staleness=0, max_new_tokens=100))
    assert isinstance(made, Dapo)
    return made


def row(reward: float, tokens: int = 2, finish_reason: str = "stop") -> Cells:
    return {"reward": reward, "response_mask": np.ones(tokens), "finish_reason": finish_reason}


def test_the_penalty_rises_over_the_last_tokens() -> None:
    soft = dapo(OverlongConfig(penalty_tokens=20, penalty_factor=0.5))
    assert [soft.penalty(tokens) for tokens in (50, 80, 85, 90, 100)] == [0.0, 0.0, 0.125, 0.25, 0.5]
    assert dapo().penalty(100) == 0.0


def test_a_long_response_gains_less_than_a_short_one_that_is_as_good() -> None:
    short, long = dapo(OverlongConfig(penalty_tokens=20)).advantages([row(1.0, 10), row(1.0, 100)])
    assert short["advantages"][0] > 0 > long["advantages"][0]


def test_a_filter_leaves_the_actor_all_columns_that_a_penalty_needs() -> None:
    kl = KlConfig(coefficient=0.01, adaptive=AdaptiveKl(target=0.01))
    config = DapoConfig(group_size=2, overlong=OverlongConfig(filter=True), kl=kl)
    actor = make_algorithm(config.resolved(max_staleness=0, max_new_tokens=100)).tasks[-1]
    assert {"ref_log_probs", "kl_coefficient", "kept"} <= {*actor.reads}


def test_a_response_that_was_cut_off_counts_in_its_group_and_not_in_the_loss() -> None:
    algorithm = dapo(OverlongConfig(filter=True))
    whole, cut = algorithm.advantages([row(1.0), row(0.0, finish_reason="length")])
    assert whole["advantages"][0] > 0 > cut["advantages"][0]
    assert (whole["kept"].tolist(), cut["kept"].tolist()) == ([1, 1], [0, 0])
    assert "kept" in algorithm.tasks[-1].reads
    log_probs = torch.full((4,), -1.0, requires_grad=True)
    inputs = LossInputs(
        log_probs_N=log_probs,
        old_log_probs_N=log_probs.detach(),
        mask_N=torch.ones(4),
        sample_N=torch.tensor([0, 0, 1, 1]),
        samples=2,
        columns_N={
            name: torch.tensor([*whole[name], *cut[name]], dtype=torch.float32) for name in ("advantages", "kept")
        },
    )
    output = algorithm.loss(inputs)
    assert output.denominator == 2
    slope = torch.autograd.grad(output.loss_sum, log_probs)[0]
    assert slope[:2].abs().min() > 0
    assert slope[2:].tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("rewards", "none"),
    [([1.0, 1.0], True), ([0.0, 0.0], True), ([1.0, 0.0], False), ([1.0, math.nan], False), ([math.nan] * 2, False)],
)
def test_a_group_whose_rewards_are_all_equal_has_no_signal(rewards: list[float], none: bool) -> None:
    assert has_no_signal([row(reward) for reward in rewards]) == none


def test_groups_without_signal_may_be_kept() -> None:
    def remake(config: DapoConfig) -> object:
        (work,) = (task.work for task in make_algorithm(config).tasks if task.name == "advantage")
        assert isinstance(work, Compute)
        return work.remake

    assert remake(DapoConfig(dynamic_sampling=None)) is None
    found = remake(DapoConfig(dynamic_sampling=DynamicSamplingConfig(max_attempts=3)))
    assert found is not None
