"""The gradient that a loss gives is the slope of its value."""

from dataclasses import replace

import pytest
import torch

from tests.helpers.responses import MODES, random_responses
from tests.oracle.entries import ENTRIES
from tests.oracle.entry import Entry

LOSSES = [entry for entry in ENTRIES if entry.ours(random_responses(0)).requires_grad and not entry.holds_constant]


@pytest.mark.parametrize("seed", range(2 * len(MODES)))
@pytest.mark.parametrize("entry", LOSSES, ids=lambda entry: entry.name)
def test_gradients_are_finite_differences_in_fp64(entry: Entry, seed: int) -> None:
    responses = entry.draw(seed)

    def value(log_probs_BR: torch.Tensor) -> torch.Tensor:
        return entry.ours(replace(responses, log_probs_BR=log_probs_BR))

    assert torch.autograd.gradcheck(value, responses.log_probs_BR)
