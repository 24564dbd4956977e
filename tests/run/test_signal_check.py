"""A step that trains on something else than was sampled gives a warning or ends the run."""

import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.config.run import RunConfig
from tailrace.errors import ConfigError, TrainingError
from tailrace.events import Event, EventLog, read_events
from tailrace.run.learner import LocalLearner
from tailrace.run.signal_check import SignalCheck
from tailrace.run.train import train
from tailrace.tasks.actor import train_sample
from tailrace.transfer.queue.base import Row, RowId
from tests.conftest import TinyModel
from tests.helpers.runs import small_run, steps_of, write_prompts
from tests.run.test_learner import NoEngines, Witness
from tests.tasks.test_actor import Bench, rows

CHECK = SignalCheck(mismatch_warning=0.1, mismatch_error=0.5, max_staleness=1)


@given(mismatch=st.floats(0, 10) | st.just(math.nan))
def test_a_mismatch_is_judged_by_its_bounds_and_none_passes_as_no_number(mismatch: float) -> None:
    metrics = {"on_policy_mismatch": mismatch}
    assert (CHECK.error(0, metrics) is None) == (mismatch <= 0.5)
    assert (CHECK.warning(0, metrics) is None) == (mismatch <= 0.1)


def test_what_is_said_has_the_figure_the_bound_and_the_key() -> None:
    assert "step 4 has on_policy_mismatch 0.7 nats, above trainer.mismatch_error 0.5" in str(
        CHECK.error(3, {"on_policy_mismatch": 0.7})
    )
    assert "step 4 has on_policy_mismatch nan nats" in str(CHECK.error(3, {"on_policy_mismatch": math.nan}))
    assert "above trainer.mismatch_warning 0.1" in str(CHECK.warning(3, {"on_policy_mismatch": 0.2}))


def test_engines_that_round_what_the_trainer_does_not_are_named_as_a_cause(tmp_path: Path) -> None:
    metrics = {"on_policy_mismatch": 9.0}
    for engine, trainer, named in (("bfloat16", "fp32", True), ("float32", "fp32", False), ("bfloat16", "bf16", False)):
        settings = {"engine": {"type": "native", "dtype": engine}, "trainer__precision": trainer}
        check = SignalCheck.of(config_of(tmp_path, **settings))
        for said in (check.error(0, metrics), check.warning(0, metrics)):
            assert said is not None
            assert ("engines in bfloat16 lose the small updates" in said) == named


def test_tokens_of_weights_older_than_may_be_are_an_error() -> None:
    assert CHECK.error(5, {"staleness_max": 1.0}) is None
    assert "step 6 has trained on tokens of weights 2 versions old" in str(CHECK.error(5, {"staleness_max": 2.0}))


def test_stale_tokens_alone_are_not_judged() -> None:
    assert CHECK.error(0, {"rollout_mismatch": 9.0, "on_policy": 0.0}) is None


def config_of(tmp_path: Path, **settings: Any) -> RunConfig:
    return small_run(tmp_path / "run", tmp_path, tmp_path / "p.jsonl", **settings)


@pytest.mark.parametrize(
    ("settings", "bounds"),
    [
        ({}, (0.001, 0.1)),
        ({"trainer__precision": "bf16"}, (0.15, 0.5)),
        ({"engine": {"type": "native", "dtype": "bfloat16"}}, (0.15, 0.5)),
        ({"engine": {"type": "adapter", "path": "my.engine"}}, (0.15, 0.5)),
        ({"engine": {"type": "fake"}}, (math.inf, math.inf)),
        ({"sampling__top_p": 0.9}, (math.inf, math.inf)),
        ({"sampling__top_k": 5}, (math.inf, math.inf)),
        ({"sampling__min_p": 0.1}, (math.inf, math.inf)),
        ({"trainer__mismatch_warning": 0.02}, (0.02, 0.1)),
        ({"trainer__mismatch_warning": 2.0}, (2.0, 2.0)),
        ({"trainer__mismatch_error": 0.0005}, (0.0005, 0.0005)),
    ],
)
def test_the_bounds_are_those_of_the_precision_where_the_recipe_has_none(
    tmp_path: Path, settings: Mapping[str, Any], bounds: tuple[float, float]
) -> None:
    assert config_of(tmp_path, **settings).mismatch_bounds == bounds


def test_a_warning_that_can_never_come_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.mismatch_warning 1 is above trainer\.mismatch_error 0\.5"):
        config_of(tmp_path, trainer__mismatch_warning=1.0, trainer__mismatch_error=0.5)


@pytest.mark.parametrize(
    ("versions", "version", "on_policy"), [([3, 3], 3, True), ([2, 3], 3, False), ([3], None, None)]
)
def test_a_response_is_on_policy_if_the_trained_weights_made_all_of_it(
    versions: list[int], version: int | None, on_policy: bool | None
) -> None:
    cells: dict[str, Any] = {
        "prompt_ids": np.array([1]),
        "response_ids": np.array(versions),
        "weight_versions": np.array(versions),
    }
    row = Row(id=RowId(0, 0), group_id=0, order=0, cells=cells)
    assert train_sample(row, version).on_policy is on_policy


@pytest.mark.parametrize("last", [0.6, math.nan, math.inf])
async def test_a_warning_is_given_once_until_the_figures_are_right_again(
    log: EventLog, events: list[Event], executor: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, last: float
) -> None:
    mismatches = iter([0.2, 0.3, 0.0, 0.2, last])
    monkeypatch.setattr("tailrace.run.learner.step_metrics", lambda *_: {"on_policy_mismatch": next(mismatches)})
    bench = Bench(log, executor, tokens=None, mini=8)
    learner = LocalLearner(bench.actor, bench.trainer, executor, NoEngines(), Witness(bench.trainer), log, check=CHECK)
    for step in range(5):
        await bench.queue.put(rows(2 * step) + rows(2 * step + 1))
        if step < 4:
            await learner.train(step)
    with pytest.raises(TrainingError, match=rf"step 5 has on_policy_mismatch {last} nats"):
        await learner.train(4)
    assert [event.step for event in events if event.task == "warning"] == [0, 3]
    assert [event.step for event in events if event.task == "step"] == [0, 1, 2, 3, 4]


def trainer_of_another_temperature(factor: float) -> dict[str, Any]:
    return {"type": "adapter", "path": "tests.helpers.hot_trainer.make", "options": {"factor": factor}}


def test_a_run_whose_trainer_has_another_distribution_ends_with_the_figure(
    tmp_path: Path, tiny_model: TinyModel
) -> None:
    run = tmp_path / "run"
    prompts = write_prompts(tmp_path / "p.jsonl")
    config = small_run(run, tiny_model("llama"), prompts, trainer__backend=trainer_of_another_temperature(4.0))
    with pytest.raises(TrainingError, match=r"step 1 has on_policy_mismatch .* above trainer\.mismatch_error 0\.1"):
        train(config, resume=False)
    assert len(steps_of(run)) == 1


def test_a_run_whose_trainer_differs_a_little_warns_and_one_that_agrees_does_not(
    tmp_path: Path, tiny_model: TinyModel
) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl")
    for factor, warnings in ((1.02, 1), (1.0, 0)):
        run = tmp_path / f"run-{factor}"
        backend = trainer_of_another_temperature(factor)
        train(small_run(run, tiny_model("llama"), prompts, trainer__steps=2, trainer__backend=backend), resume=False)
        told = [event for event in read_events(run / "events.jsonl") if event.task == "warning"]
        assert [event.info["kind"] for event in told] == ["on_policy_mismatch"] * warnings
        assert all(event.metrics["on_policy"] == 1.0 for event in steps_of(run))
