"""Advantages from the rewards of groups and of whole steps; they have no gradient. verl has none of MaxRL."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import torch

from tailrace.algorithms.advantages import group_normalized, leave_one_out
from tailrace.algorithms.ppo import Ppo
from tailrace.algorithms.reinforce_plus_plus import ReinforcePlusPlus
from tailrace.config.algorithm import KlConfig, NoCorrection, PpoConfig, ReinforcePlusPlusConfig
from tests.helpers.responses import Responses, random_responses
from tests.oracle.entry import Entry
from tests.oracle.kl import K3_CLAMPS, verls_kl

LONE = "a lone sample has the advantage 0 here, and its reward in verl; all groups have two or more"
WHITENS = "ours are rounded to fp32; verl adds 1e-8 to a number of tokens, which shows only where all rewards are equal"
ENGINES = "the penalty is that of the engine's log-probabilities here, and verl is given the same"
VERLS_EPS = 1e-8
"""What verl adds to the variance of a step's tokens."""


def by_group(responses: Responses, credit: Callable[[Sequence[float]], Sequence[float]]) -> torch.Tensor:
    """Return [B, R]: our advantages, where `credit` makes those of a group from its rewards."""
    advantages_B = torch.zeros_like(responses.rewards_B)
    for group in responses.groups:
        found = credit(responses.rewards_B[group].tolist())
        advantages_B[group] = torch.tensor(found, dtype=advantages_B.dtype)
    return advantages_B[:, None] * responses.mask_BR


def reinforce_plus_plus(responses: Responses, *, has_baseline: bool = False, has_kl: bool = False) -> torch.Tensor:
    """Return [B, R]: our advantages of a step, maybe with the mean of a group as baseline, or a penalty of rewards."""
    coefficient = responses.kl_coefficient if has_kl else 0.0
    config = ReinforcePlusPlusConfig(
        group_size=len(responses.groups[0]),
        baseline="group" if has_baseline else "none",
        advantage_eps=VERLS_EPS,
        kl=KlConfig(coefficient=coefficient, estimator=responses.estimator, part_of="reward"),
        rollout_correction=NoCorrection(),
    )
    return of_step(ReinforcePlusPlus(config), responses, "advantages")


def ppo(responses: Responses) -> torch.Tensor:
    """Return [2, B, R]: our advantages of a step, normalized and with a penalty of rewards, and our returns."""
    config = PpoConfig(
        discount=responses.discount,
        gae_lambda=responses.gae_lambda,
        advantage_eps=VERLS_EPS,
        kl=KlConfig(coefficient=responses.kl_coefficient, estimator=responses.estimator, part_of="reward"),
        rollout_correction=NoCorrection(),
    )
    return torch.stack([of_step(Ppo(config), responses, column) for column in ("advantages", "returns")])


def of_step(algorithm: ReinforcePlusPlus | Ppo, responses: Responses, column: str) -> torch.Tensor:
    """Return [B, R]: a column of a step that consists of the responses, those of a group together."""
    order = torch.cat(responses.groups)
    found = algorithm.advantages([responses.row(number) for number in order.tolist()])
    packed = [torch.tensor(found[place][column]) for place in order.argsort().tolist()]
    return responses.padded(torch.cat(packed).to(responses.mask_BR.dtype))


def verls(verl: ModuleType, responses: Responses, name: str, *, has_kl: bool = False, **options: Any) -> torch.Tensor:
    """Return [B, R]: the advantages that verl calls `name`."""
    advantages_BR: torch.Tensor
    advantages_BR, _returns = verl.core_algos.get_adv_estimator_fn(name)(
        token_level_rewards=penalized(verl, responses) if has_kl else responses.token_rewards_BR,
        response_mask=responses.mask_BR,
        index=responses.group_B.numpy(),
        config=verl.core_algos.AlgoConfig(gamma=1.0),
        **options,
    )
    return advantages_BR


def verls_ppo(verl: ModuleType, responses: Responses) -> torch.Tensor:
    """Return [2, B, R]: verl's advantages, which are always normalized, and its returns."""
    found = verl.core_algos.compute_gae_advantage_return(
        penalized(verl, responses),
        responses.columns_BR["values"],
        responses.mask_BR,
        gamma=responses.discount,
        lam=responses.gae_lambda,
    )
    return torch.stack(found) * responses.mask_BR


def penalized(verl: ModuleType, responses: Responses) -> torch.Tensor:
    """Return [B, R]: the rewards, less verl's penalty as its trainer takes it off."""
    penalty_BR = verls_kl(verl, responses, responses.columns_BR["rollout_log_probs"], responses.estimator)
    return responses.token_rewards_BR - responses.kl_coefficient * penalty_BR * responses.mask_BR


def varied(seed: int) -> Responses:
    """Draw responses of which no two have the same reward."""
    responses = random_responses(seed)
    return replace(responses, rewards_B=responses.columns_BR["advantages"][:, 0])


def grpo(*, normalize_std: bool) -> Entry:
    """The advantages of GRPO, or of Dr. GRPO, which are not divided by the deviation."""

    def ours(responses: Responses) -> torch.Tensor:
        return by_group(responses, partial(group_normalized, normalize_std=normalize_std, eps=responses.eps))

    def theirs(verl: ModuleType, responses: Responses) -> torch.Tensor:
        return verls(verl, responses, "grpo", epsilon=responses.eps, norm_adv_by_std_in_grpo=normalize_std)

    name = "group_normalized" if normalize_std else "group_normalized without std (Dr. GRPO)"
    return Entry(name=name, ours=ours, verls=theirs, differs=LONE)


ENTRIES = (
    grpo(normalize_std=True),
    grpo(normalize_std=False),
    Entry(
        name="leave_one_out (RLOO)",
        ours=partial(by_group, credit=leave_one_out),
        verls=partial(verls, name="rloo"),
        differs=LONE,
    ),
    Entry(
        name="REINFORCE++",
        ours=reinforce_plus_plus,
        verls=partial(verls, name="reinforce_plus_plus"),
        draw=varied,
        differs=WHITENS,
    ),
    Entry(
        name="REINFORCE++ with KL penalty",
        ours=partial(reinforce_plus_plus, has_kl=True),
        verls=partial(verls, name="reinforce_plus_plus", has_kl=True),
        draw=varied,
        differs=f"{WHITENS}; {K3_CLAMPS}; {ENGINES}",
    ),
    Entry(
        name="REINFORCE++ with baseline",
        ours=partial(reinforce_plus_plus, has_baseline=True),
        verls=partial(verls, name="reinforce_plus_plus_baseline"),
        draw=varied,
        differs=f"{WHITENS}; {LONE}",
    ),
    Entry(
        name="PPO with KL penalty, advantages and returns",
        ours=ppo,
        verls=verls_ppo,
        differs=f"{WHITENS}; {K3_CLAMPS}; {ENGINES}; outside the mask, ours are 0 and verl's are not defined",
    ),
)
