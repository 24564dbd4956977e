"""Figures of a step, for plans and for runs."""

from typing import Any

import msgspec

from tailrace.planning.dispatch.costs import StepCosts
from tailrace.planning.foretold import Foretold, StepFigures

FIGURES = StepFigures(
    steps=4,
    step_s=10.0,
    generation_s=6.0,
    install_s=0.1,
    reward_s=0.5,
    reference_s=0.4,
    training_s=3.0,
    weights_s=0.5,
    arrival_s=0.2,
    waiting_s=6.2,
    optimizer_s=0.5,
    samples=64.0,
    prompt_tokens=100.0,
    response_tokens=400.0,
    longest_tokens=1000.0,
    trained_tokens=64 * 400.0 + 8 * 100,
    engines=2.0,
    batch=20.0,
    context=300.0,
    token_s=0.02,
    grading_s=0.01,
    staleness=0.0,
)


def figures(**changes: Any) -> StepFigures:
    """Those of a plan, with changes."""
    return msgspec.structs.replace(FIGURES, **changes)


def foretold(**changes: Any) -> Foretold:
    """A plan whose decode steps take 10 ms, and 0.5 ms more for each sequence."""
    whole: dict[str, Any] = {
        "of": "small under math on 4 H100",
        "rests_on": "analytic step times",
        "least_s": 9.0,
        "most_s": 11.0,
        "figures": FIGURES,
        "decode": StepCosts(base=0.01, each=0.0005, context=0.0, prefill=0.0),
        "replicas": 1,
    }
    return Foretold(**(whole | changes))
