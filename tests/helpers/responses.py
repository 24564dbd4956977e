"""Random responses for losses: padded, as most implementations have them, and packed, as Tailrace has them.

Shapes beside those of `tailrace.types`: [B, R] for B responses, padded to the longest one, R tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

import torch

from tailrace.algorithms.loss_inputs import LossInputs
from tailrace.config.algorithm import KlEstimator, LossAggMode

MODES: tuple[LossAggMode, ...] = get_args(LossAggMode)
ESTIMATORS: tuple[KlEstimator, ...] = get_args(KlEstimator)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Responses:
    """B responses, and settings of the functions that are called with them. What lies outside the mask is noise."""

    is_token_BR: torch.Tensor
    """bool: False on padding."""
    mask_BR: torch.Tensor
    """`response_mask`, 0 on padding. It has holes, and some responses have no trained token."""
    log_probs_BR: torch.Tensor
    """These carry the gradient. They are the values where a critic is trained."""
    old_log_probs_BR: torch.Tensor
    columns_BR: Mapping[str, torch.Tensor]
    """Further numbers of each token, by the name of their column."""
    rewards_B: torch.Tensor
    group_B: torch.Tensor
    """int64, the number of each response's group. Groups have one size, two or more, and are not in one place."""
    mode: LossAggMode
    estimator: KlEstimator
    clip_low: float
    clip_high: float
    norm_tokens: int
    """What `seq-mean-token-sum-norm` divides by."""
    limit: float
    """The largest weight of importance sampling."""
    kl_coefficient: float
    eps: float
    """The constant beside a standard deviation."""
    discount: float
    gae_lambda: float
    value_clip: float

    @property
    def packed(self) -> LossInputs:
        """The same responses without padding."""
        count = len(self.is_token_BR)
        return LossInputs(
            log_probs_N=self.log_probs_BR[self.is_token_BR],
            old_log_probs_N=self.old_log_probs_BR[self.is_token_BR],
            mask_N=self.mask_BR[self.is_token_BR],
            sample_N=torch.arange(count).repeat_interleave(self.is_token_BR.sum(1)),
            samples=count,
            columns_N={name: values[self.is_token_BR] for name, values in self.columns_BR.items()},
        )

    @property
    def token_rewards_BR(self) -> torch.Tensor:
        """The rewards on the last trained tokens, or on the first ones where none is trained; 0 on the others."""
        place_BR = torch.arange(self.mask_BR.shape[1]) * self.mask_BR
        last_B1 = place_BR.argmax(1, keepdim=True)
        return torch.zeros_like(self.mask_BR).scatter(1, last_B1, self.rewards_B[:, None])

    @property
    def groups(self) -> list[torch.Tensor]:
        """The numbers of the responses of each group."""
        return [torch.nonzero(self.group_B == group)[:, 0] for group in range(int(self.group_B.max()) + 1)]

    def row(self, number: int) -> dict[str, Any]:
        """The cells of one response."""
        is_token_R = self.is_token_BR[number]
        columns = {name: values[number][is_token_R].numpy() for name, values in self.columns_BR.items()}
        mask = self.mask_BR[number][is_token_R].numpy()
        return {"reward": self.rewards_B[number].item(), "response_mask": mask, **columns}

    def padded(self, values_N: torch.Tensor) -> torch.Tensor:
        """Return [B, R]: the values of packed tokens in their places, and 0 on padding."""
        return values_N.new_zeros(self.is_token_BR.shape).masked_scatter(self.is_token_BR, values_N)


def random_responses(seed: int) -> Responses:
    """Draw responses in fp64, and settings. `mode` changes from each seed to the next."""
    random = torch.Generator().manual_seed(seed)

    def uniform(low: float, high: float) -> float:
        return low + (high - low) * torch.rand((), generator=random, dtype=torch.float64).item()

    def integer(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=random))

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random, dtype=torch.float64)

    group_B = torch.arange(integer(1, 4)).repeat_interleave(integer(2, 5))
    group_B = group_B[torch.randperm(len(group_B), generator=random)]
    shape = (len(group_B), integer(2, 12))
    length_B = torch.randint(2, shape[1] + 1, shape[:1], generator=random)
    is_token_BR = torch.arange(shape[1]) < length_B[:, None]
    mask_BR = (torch.rand(shape, generator=random) >= (0.0, 0.2, 0.6)[integer(0, 2)]) & is_token_BR
    mask_BR &= torch.rand((shape[0], 1), generator=random) >= 0.1
    mask_BR[:2, :2] = True  # the mean and the variance of no token are not numbers
    log_probs_BR = -normal(*shape).abs()

    def nearby() -> torch.Tensor:
        """Log-probabilities at most 2 away, so no function's guard against overflow takes effect."""
        return log_probs_BR + (0.5 * normal(*shape)).clamp(-2, 2)

    return Responses(
        is_token_BR=is_token_BR,
        mask_BR=mask_BR.double(),
        log_probs_BR=log_probs_BR.clone().requires_grad_(),
        old_log_probs_BR=nearby(),
        columns_BR={
            "advantages": normal(*shape),
            "ref_log_probs": nearby(),
            "rollout_log_probs": nearby(),
            "values": normal(*shape),
            "returns": normal(*shape),
        },
        rewards_B=(normal(shape[0]) > 0).double() if integer(0, 1) else 3 * normal(shape[0]),
        group_B=group_B,
        mode=MODES[seed % len(MODES)],
        estimator=ESTIMATORS[integer(0, len(ESTIMATORS) - 1)],
        clip_low=uniform(0.05, 0.6),
        clip_high=uniform(0.05, 0.6),
        norm_tokens=integer(1, 20),
        limit=uniform(1, 3),
        kl_coefficient=uniform(0.01, 1),
        eps=10 ** uniform(-8, -3),
        discount=uniform(0.8, 1),
        gae_lambda=uniform(0.5, 1),
        value_clip=uniform(0.1, 1),
    )
