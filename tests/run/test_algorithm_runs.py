"""Every algorithm of the package in whole runs of the small model."""

from pathlib import Path
from typing import Any

import pytest

from tailrace.run.train import train
from tests.conftest import TinyModel
from tests.helpers.local_workers import use_local_workers
from tests.helpers.runs import assert_same_run, small_run, steps_of, write_prompts

ALGORITHMS: dict[str, dict[str, Any]] = {
    "dr_grpo": {},
    "rloo": {"kl": {"coefficient": 0.1, "part_of": "reward"}},
    "reinforce_plus_plus": {"kl": {"coefficient": 0.1, "part_of": "reward", "estimator": "k1"}},
    "reinforce_plus_plus with a baseline": {"baseline": "group", "kl": {"coefficient": 0.1, "estimator": "k2"}},
    "gspo": {},
    "cispo": {},
    "dapo": {"overlong": {"penalty_tokens": 4}},
    "max_rl": {},
    "ppo": {"kl": {"coefficient": 0.1, "part_of": "reward"}, "critic": {"lr": 1e-3}},
}


@pytest.fixture
def local(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run workers as tasks of this process, without Ray."""
    use_local_workers(monkeypatch)


@pytest.mark.usefixtures("local")
@pytest.mark.parametrize("name", ALGORITHMS)
def test_separated_without_staleness_learns_what_colocated_does(
    name: str, tmp_path: Path, tiny_model: TinyModel
) -> None:
    algorithm = {"type": name.split(" ")[0], "group_size": 4, **ALGORITHMS[name]}
    prompts, model = write_prompts(tmp_path / "prompts.jsonl"), tiny_model("llama")
    for placement in ("colocated", "separated"):
        run = small_run(
            tmp_path / placement,
            model,
            prompts,
            algorithm=algorithm,
            pipeline={"placement": placement, "max_staleness": 0},
            trainer__steps=2,
            trainer__mini_batch_size=4,
        )
        assert train(run, resume=False) == 0
    steps = steps_of(tmp_path / "colocated")
    assert all(step.metrics["grad_norm"] > 0 for step in steps)
    assert all(("ref_kl" in step.metrics) == ("kl" in algorithm) for step in steps)
    assert_same_run(tmp_path / "colocated", tmp_path / "separated")


@pytest.mark.usefixtures("local")
@pytest.mark.parametrize("streaming", [False, True])
def test_groups_without_signal_are_remade_in_both_placements(
    streaming: bool, tmp_path: Path, tiny_model: TinyModel
) -> None:
    """About a third of all groups of 4 have equal rewards."""
    prompts, model = write_prompts(tmp_path / "prompts.jsonl"), tiny_model("llama")
    algorithm = {"type": "dapo", "group_size": 4, "dynamic_sampling": {"max_attempts": 3}}
    for placement in ("colocated", "separated"):
        run = small_run(
            tmp_path / placement,
            model,
            prompts,
            algorithm=algorithm,
            pipeline={"placement": placement, "streaming": streaming},
            rewards__grader={"type": "function", "path": "tests.helpers.graders.one_in_four"},
            trainer__steps=3,
        )
        assert train(run, resume=False) == 0
        assert sum(step.metrics.get("remade_groups", 0.0) for step in steps_of(tmp_path / placement)) > 0
    if not streaming:  # in a stream the gradient's order of summation differs
        assert_same_run(tmp_path / "colocated", tmp_path / "separated")
