"""The rollout correction that a run uses when its recipe leaves it open."""

import re
from pathlib import Path
from typing import Any

import pytest

from tailrace.config.algorithm import (
    GrpoConfig,
    MaskedCorrection,
    NoCorrection,
    RolloutCorrection,
    TruncatedCorrection,
)
from tailrace.config.run import RunConfig
from tailrace.errors import ConfigError
from tests.helpers.runs import small_run


def config(**changes: Any) -> RunConfig:
    return small_run(Path("run"), Path("model"), Path("prompts.jsonl"), **changes)


@pytest.mark.parametrize(
    ("max_staleness", "chosen", "expected"),
    [
        (0, None, NoCorrection()),
        (1, None, TruncatedCorrection(limit=2.0, level="token")),
        (4, None, TruncatedCorrection(limit=2.0, level="token")),
        (4, {"type": "none"}, NoCorrection()),
        (0, {"type": "truncated", "limit": 5.0}, TruncatedCorrection(limit=5.0)),
        (
            1,
            {"type": "masked", "level": "sequence"},
            MaskedCorrection(level="sequence", lower=0.5, upper=5.0),
        ),
    ],
)
def test_stale_responses_are_corrected_unless_the_recipe_says_otherwise(
    max_staleness: int, chosen: dict[str, Any] | None, expected: RolloutCorrection
) -> None:
    run = config(pipeline={"max_staleness": max_staleness}, algorithm__rollout_correction=chosen)
    assert isinstance(run.resolved_algorithm, GrpoConfig)
    assert run.resolved_algorithm.rollout_correction == expected
    assert run.resolved_algorithm.group_size == run.algorithm.group_size


@pytest.mark.parametrize(
    ("section", "values", "told"),
    [
        ("rollout_correction", {"type": "truncated", "limit": 0.5}, "limit is 0.5"),
        ("rollout_correction", {"type": "masked", "lower": 1.5}, "lower is 1.5"),
        ("rollout_correction", {"type": "masked", "upper": 0.5}, "upper is 0.5"),
        ("rollout_rejection", {"type": "ratio", "lower": 2.0}, "lower is 2.0"),
        ("rollout_rejection", {"type": "kl", "upper": 0.0}, "upper is 0.0"),
    ],
)
def test_bounds_that_leave_out_tokens_of_the_policy_itself_are_refused(
    section: str, values: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"algorithm.{section}.{told}")):
        config(**{f"algorithm__{section}": values})


@pytest.mark.parametrize(("name", "value"), [("top_k", 20), ("top_p", 0.9), ("min_p", 0.1)])
def test_responses_of_a_cut_distribution_are_not_corrected_by_the_whole_one(name: str, value: float) -> None:
    cut = {f"sampling__{name}": value}
    with pytest.raises(ConfigError, match=rf"sampling\.{name} .* algorithm\.rollout_correction\.type=none"):
        config(pipeline={"max_staleness": 1}, **cut)
    with pytest.raises(ConfigError, match=rf"sampling\.{name} .* no rollout_rejection"):
        config(algorithm__rollout_rejection={"type": "ratio"}, **cut)
    config(pipeline={"max_staleness": 1}, algorithm__rollout_correction={"type": "none"}, **cut)
    config(**cut)


@pytest.mark.parametrize("mode", ["delayed", "sub_step"])
def test_a_colocated_engine_takes_weights_at_once(mode: str) -> None:
    with pytest.raises(ConfigError, match=rf"weights\.mode {mode} is for pipeline\.placement separated"):
        config(weights={"mode": mode})
    config(weights={"mode": mode}, pipeline={"placement": "separated"}, queue={"type": "service"})
