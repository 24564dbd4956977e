"""An entry: a function of Tailrace beside verl's, and their comparison on random cases."""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from tests.helpers.responses import MODES, Responses, random_responses

CASES = 200 * len(MODES)
"""Number of cases of a function: 200 for each way to aggregate, whether the function aggregates or not."""
BAR = 1e-6
"""The largest absolute difference that is allowed, in fp64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A function of Tailrace, and the same of verl. Both return tensors of one shape."""

    name: str
    ours: Callable[[Responses], torch.Tensor]
    verls: Callable[[ModuleType, Responses], torch.Tensor]
    """Gets the package `verl.trainer.ppo` and the responses."""
    draw: Callable[[int], Responses] = random_responses
    """Draws the case of a seed."""
    holds_constant: bool = False
    """The gradient is by definition not that of the value: a part of the loss is taken as constant."""
    differs: str = ""
    """How the two differ by definition, and why the cases are comparable all the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """The largest absolute differences over all cases; NaN where something is not a number."""

    cases: int
    value: float
    gradient: float | None
    """Of the sum of the values, in `log_probs_BR`; None where the functions have no gradient."""
    worst: int
    """The seed of the case with the largest difference."""

    def as_json(self) -> dict[str, Any]:
        """The figures for the JSON line."""
        return {"cases": self.cases, "value": self.value, "gradient": self.gradient}


def compare(entry: Entry, verl: ModuleType, cases: int = CASES) -> Agreement:
    """Call both functions with each case.

    Raises:
        AssertionError: they return different shapes, or only one has a gradient.
    """
    differences = []
    for seed in range(cases):
        responses = entry.draw(seed)
        ours, verls = entry.ours(responses), entry.verls(verl, responses)
        assert ours.shape == verls.shape, f"the shape of ours is {list(ours.shape)}, of verl's {list(verls.shape)}"
        assert ours.requires_grad == verls.requires_grad, (
            f"only {'ours' if ours.requires_grad else 'verl'} has a gradient"
        )
        value = (ours - verls).detach().abs().max()
        differences.append(torch.stack([value, _gradient_difference(ours, verls, responses.log_probs_BR)]))
    largest = torch.stack(differences)
    return Agreement(
        cases=cases,
        value=largest[:, 0].max().item(),
        gradient=largest[:, 1].max().item() if ours.requires_grad else None,
        worst=int(largest.amax(1).argmax()),
    )


def _gradient_difference(ours: torch.Tensor, verls: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
    if not ours.requires_grad:
        return leaf.new_zeros(())
    found, expected = (torch.autograd.grad(values.sum(), leaf)[0] for values in (ours, verls))
    return (found - expected).abs().max()
