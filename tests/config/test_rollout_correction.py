"""The rollout correction that a run uses when its recipe leaves it open."""

from pathlib import Path
from typing import Any

import pytest

from tailrace.config.algorithm import GrpoConfig
from tailrace.config.run import RunConfig
from tailrace.errors import ConfigError
from tests.helpers.runs import small_run


def config(**changes: Any) -> RunConfig:
    return small_run(Path("run"), Path("model"), Path("prompts.jsonl"), **changes)


@pytest.mark.parametrize(
    ("max_staleness", "chosen", "expected"),
    [
        (0, None, {"type": "none"}),
        (1, None, {"type": "truncated", "limit": 2.0}),
        (4, None, {"type": "truncated", "limit": 2.0}),
        (4, {"type": "none"}, {"type": "none"}),
        (0, {"type": "truncated", "limit": 5.0}, {"type": "truncated", "limit": 5.0}),
    ],
)
def test_stale_responses_are_corrected_unless_the_recipe_says_otherwise(
    max_staleness: int, chosen: dict[str, Any] | None, expected: dict[str, Any]
) -> None:
    run = config(pipeline={"max_staleness": max_staleness}, algorithm__rollout_correction=chosen)
    assert isinstance(run.resolved_algorithm, GrpoConfig)
    found = run.resolved_algorithm.rollout_correction
    assert found is not None
    assert found.model_dump() == expected
    assert run.resolved_algorithm.group_size == run.algorithm.group_size


def test_a_limit_that_lowers_every_token_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.rollout_correction\.limit is 0\.5"):
        config(algorithm__rollout_correction={"type": "truncated", "limit": 0.5})


@pytest.mark.parametrize(("name", "value"), [("top_k", 20), ("top_p", 0.9), ("min_p", 0.1)])
def test_responses_of_a_cut_distribution_are_not_corrected_by_the_whole_one(name: str, value: float) -> None:
    cut = {f"sampling__{name}": value}
    with pytest.raises(ConfigError, match=rf"sampling\.{name} .* algorithm\.rollout_correction\.type=none"):
        config(pipeline={"max_staleness": 1}, **cut)
    config(pipeline={"max_staleness": 1}, algorithm__rollout_correction={"type": "none"}, **cut)
    config(**cut)


@pytest.mark.parametrize("mode", ["delayed", "sub_step"])
def test_a_colocated_engine_takes_weights_at_once(mode: str) -> None:
    with pytest.raises(ConfigError, match=rf"weights\.mode {mode} is for pipeline\.placement separated"):
        config(weights={"mode": mode})
    config(weights={"mode": mode}, pipeline={"placement": "separated"}, queue={"type": "service"})
