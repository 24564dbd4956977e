"""Runs whose KL penalty is adaptive: each step has the coefficient that the divergence of earlier steps led to."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tailrace.config.algorithm import AdaptiveKl
from tailrace.errors import ConfigError
from tailrace.planning.kl_control import next_coefficient
from tailrace.run.own_loop import Engines
from tailrace.run.train import train
from tests.conftest import TinyModel
from tests.helpers.local_workers import use_local_workers
from tests.helpers.runs import learned, small_run, steps_of

ADAPTIVE = AdaptiveKl(target=1e-4, gain=1.0)


def section(part_of: str) -> dict[str, Any]:
    return {"coefficient": 0.1, "adaptive": ADAPTIVE.model_dump(), "part_of": part_of, "estimator": "k2"}


@pytest.mark.parametrize("part_of", ["loss", "reward"])
@pytest.mark.parametrize("placement", ["colocated", "separated"])
@pytest.mark.parametrize("max_staleness", [0, 1])
def test_the_coefficient_follows_the_divergence_of_the_steps_before(
    tmp_path: Path,
    tiny_model: TinyModel,
    prompts: Path,
    monkeypatch: pytest.MonkeyPatch,
    part_of: str,
    placement: str,
    max_staleness: int,
) -> None:
    use_local_workers(monkeypatch)
    lag = max_staleness if placement == "separated" else 0
    pipeline: dict[str, Any] = {"placement": placement, "max_staleness": lag}
    config = small_run(
        tmp_path / "run", tiny_model("llama"), prompts, pipeline=pipeline, algorithm__kl=section(part_of)
    )
    assert train(config, resume=False) == 0
    figures = [event.metrics for event in steps_of(tmp_path / "run")]
    after = [0.1]
    for step in figures:
        after.append(next_coefficient(after[-1], step["ref_kl"], ADAPTIVE))
    expected = [after[max(0, number - lag)] for number in range(len(figures))]
    assert [step["kl_coefficient"] for step in figures] == pytest.approx(expected, rel=1e-5)
    assert len({one for one, _ in pairwise(expected)}) > 1, "it has changed"


@pytest.mark.parametrize("part_of", ["loss", "reward"])
def test_a_resumed_run_goes_on_with_its_coefficients(
    tmp_path: Path, tiny_model: TinyModel, prompts: Path, part_of: str
) -> None:
    changes = {"checkpoint": {"every": 2, "keep": 5}, "algorithm__kl": section(part_of)}
    config = small_run(tmp_path / "run", tiny_model("llama"), prompts, **changes)
    train(config, resume=False)
    again = config.model_copy(update={"output_dir": str(tmp_path / "again")})
    train(again, resume=True, checkpoint=tmp_path / "run" / "checkpoints" / "step_000002")
    assert [learned(step) for step in steps_of(tmp_path / "again")] == [
        learned(step) for step in steps_of(tmp_path / "run")[2:]
    ]


def test_a_loop_of_ones_own_has_a_coefficient_of_its_own_and_serves_nobody(
    tmp_path: Path, tiny_model: TinyModel, prompts: Path
) -> None:
    separated = {"placement": "separated"}
    config = small_run(
        tmp_path / "run", tiny_model("llama"), prompts, pipeline=separated, algorithm__kl=section("loss")
    )
    with pytest.raises(ConfigError, match=r"algorithm\.kl\.adaptive follows the steps of a run"):
        Engines(config)
    served = small_run(tmp_path / "run", tiny_model("llama"), prompts, pipeline=separated, rollout={"http": {}})
    with pytest.raises(ConfigError, match=r"rollout\.http serves the engines of a run"):
        Engines(served)
    assert not (tmp_path / "run").exists()
