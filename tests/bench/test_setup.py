"""Which lengths a benchmark plays, and with which configuration."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tailrace.bench.setup import Setup, make_setup
from tailrace.config.algorithm import DapoConfig
from tailrace.config.engine import NativeEngineConfig
from tailrace.errors import ConfigError, TraceError
from tailrace.models.random import random_model
from tailrace.workloads.replay import Replay
from tests.conftest import TinyModel
from tests.helpers.bench import SEPARATED
from tests.helpers.traces import LENGTHS, write_lengths


def played(setup: Setup) -> list[list[int]]:
    return [[script.tokens for script in group] for group in Replay.of(setup.trace).groups]


def test_a_trace_is_played_as_it_was_recorded(tmp_path: Path, recipe: Path) -> None:
    setup = make_setup(write_lengths(tmp_path / "a.parquet"), recipe, ["sampling.max_new_tokens=50"])
    config = setup.config
    assert played(setup) == [group for step in LENGTHS for group in step]
    assert (config.trainer.steps, config.groups_per_step, config.algorithm.group_size) == (2, 3, 2)
    assert config.sampling.max_new_tokens == 30
    assert (config.prompts.held_out, config.prompts.shuffle, config.prompts.source.type) == (0, False, "trace")
    assert config.pipeline.replay == str(tmp_path / "run" / "given" / "workload.parquet")
    assert not (tmp_path / "run").exists()


def test_changes_make_a_recorded_trace_shorter(tmp_path: Path, recipe: Path) -> None:
    changes = ["trainer.steps=1", "sampling.max_new_tokens=10"]
    setup = make_setup(write_lengths(tmp_path / "a.parquet"), recipe, changes)
    assert setup.config.trainer.steps == 1
    assert played(setup) == [[10, 4], [5, 6], [7, 8]], "what the run does not reach is not played"
    assert setup.cut == 1
    smaller = make_setup(write_lengths(tmp_path / "a.parquet"), recipe, ["trainer.train_batch_size=4"])
    assert played(smaller) == [[12, 4], [5, 6], [7, 8], [9, 3]]
    halved = make_setup(write_lengths(tmp_path / "a.parquet"), recipe, [], scale=0.5)
    assert played(halved)[:2] == [[12, 2], [2, 3]]
    assert Replay.of(halved.trace).longest_prompt == 11


def test_what_a_recipe_says_of_its_observation_holds(tmp_path: Path, recipe: Path) -> None:
    setup = make_setup(write_lengths(tmp_path / "a.parquet"), recipe, ["observe.breakdown=false", "observe.trace=true"])
    observe = setup.config.observe
    assert (observe.breakdown, observe.trace, observe.tensorboard, observe.sample_groups) == (False, True, False, 0)


def test_adaptive_tp_knows_the_limit_of_the_recipe_and_not_the_length_of_a_response(
    tmp_path: Path, recipe: Path
) -> None:
    changes = ["sampling.max_new_tokens=50", "engine.type=native", "engine.dp=2", "engine.adaptive_tp.profile=p.json"]
    for further, longest in (([], 50), (["engine.adaptive_tp.max_response_tokens=99"], 99)):
        engine = make_setup(write_lengths(tmp_path / "a.parquet"), recipe, [*changes, *further]).config.engine
        assert isinstance(engine, NativeEngineConfig)
        assert engine.adaptive_tp is not None
        assert engine.adaptive_tp.max_response_tokens == longest


def test_what_the_lengths_decide_alone_is_left_out(tmp_path: Path, recipe: Path) -> None:
    changes = [
        "sampling.max_new_tokens=50",
        "algorithm.type=dapo",
        "algorithm.overlong.penalty_tokens=40",
        "checkpoint.keep_best=eval/accuracy",
        "prompts.held_out=4",
    ]
    config = make_setup(write_lengths(tmp_path / "a.parquet"), recipe, changes).config
    assert isinstance(config.algorithm, DapoConfig)
    assert config.algorithm.max_response_tokens == 50
    assert config.algorithm.dynamic_sampling is None, "the same lengths would be played again"
    assert config.checkpoint.keep_best is None


@pytest.mark.parametrize(
    ("changes", "devices"),
    [
        (["algorithm.kl.coefficient=0.1"], 4),
        ([*SEPARATED, "cluster.rollout.workers=3"], 3 * 4 + 1),
        ([*SEPARATED, "algorithm.kl.coefficient=0.1", "cluster.reference.workers=2"], 4 + 2 + 1),
    ],
)
def test_every_rank_and_every_other_worker_with_a_model_has_a_device(
    tmp_path: Path, recipe: Path, changes: list[str], devices: int
) -> None:
    ranks = ["engine.type=native", "engine.dp=2", "engine.tp=2"]
    assert make_setup(write_lengths(tmp_path / "a.parquet"), recipe, [*ranks, *changes]).devices == devices


def test_a_recorded_trace_cannot_be_made_longer(tmp_path: Path, recipe: Path) -> None:
    trace = write_lengths(tmp_path / "a.parquet")
    with pytest.raises(TraceError, match=r"has 6 groups, and the run takes 9; lower trainer\.steps"):
        make_setup(trace, recipe, ["trainer.steps=3"])
    with pytest.raises(TraceError, match=r"has 2 samples in its group 0, and algorithm\.group_size is 3"):
        make_setup(trace, recipe, ["algorithm.group_size=3", "trainer.train_batch_size=9"])


def test_a_workload_that_ships_is_drawn_for_the_steps_of_the_recipe(recipe: Path) -> None:
    changes = ["sampling.max_new_tokens=60"]
    setup, again, other = (make_setup("math-32b", recipe, changes, scale=0.2, seed=seed) for seed in (1, 1, 2))
    lengths = [script for group in played(setup) for script in group]
    assert len(lengths) == 4 * 2 * 4
    assert max(lengths) == setup.config.sampling.max_new_tokens <= 60
    assert setup.cut == sum(length == 60 for length in lengths) > 0
    assert played(setup) == played(again) != played(other)


def test_groups_of_a_trace_are_drawn_again_for_steps_of_the_recipes_size(tmp_path: Path, recipe: Path) -> None:
    setup = make_setup(write_lengths(tmp_path / "a.parquet"), recipe, ["algorithm.group_size=2"], resample=True)
    assert len(played(setup)) == 4 * 4
    assert all(
        group in [[min(12, tokens) for tokens in one] for step in LENGTHS for one in step] for group in played(setup)
    )


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([[[1, 2]], [[1, 2], [3, 4]]], "has steps of 1 to 2 groups, and a run has them all of one size"),
        (
            [[[1, 2], [3]]],
            "has groups of 1 to 2 samples, and a run has them all of one size; draw from it with --resample",
        ),
    ],
)
def test_an_irregular_trace_cannot_be_played_as_it_is(tmp_path: Path, recipe: Path, lengths: Any, message: str) -> None:
    with pytest.raises(TraceError, match=re.escape(message)):
        make_setup(write_lengths(tmp_path / "a.parquet", lengths), recipe, [])


def test_a_workload_that_cannot_fit_the_context_says_how_it_could(tmp_path: Path, recipe: Path) -> None:
    trace = write_lengths(tmp_path / "a.parquet", [[[600, 2]]])
    changes = ["sampling.max_new_tokens=900"]
    with pytest.raises(
        ConfigError, match=r"prompts of up to 20 and responses of up to 600 .* context .* is 512; "
    ) as error:
        make_setup(trace, recipe, changes)
    [scale, limit] = re.findall(r"--scale ([\d.]+) or sampling.max_new_tokens=(\d+)", str(error.value))[0]
    assert make_setup(trace, recipe, changes, scale=float(scale)).config.sampling.max_new_tokens <= 492
    assert make_setup(trace, recipe, [f"sampling.max_new_tokens={limit}"]).config.sampling.max_new_tokens == 492


def test_the_scale_that_is_advised_takes_the_place_of_the_one_given(tmp_path: Path, recipe: Path) -> None:
    trace = write_lengths(tmp_path / "a.parquet", [[[2000, 2]]])
    with pytest.raises(ConfigError, match=r"with --scale [\d.]+ or") as error:
        make_setup(trace, recipe, ["sampling.max_new_tokens=4000"], scale=0.5)
    scale = float(re.findall(r"--scale ([\d.]+)", str(error.value))[0])
    assert 0.2 < scale < 0.25
    make_setup(trace, recipe, ["sampling.max_new_tokens=4000"], scale=scale)
    with pytest.raises(ConfigError, match=r"with --scale [\d.]+$"):
        make_setup(trace, recipe, ["sampling.max_new_tokens=4000"], scale=100)


def test_groups_of_one_sample_cannot_be_played(tmp_path: Path, recipe: Path) -> None:
    with pytest.raises(TraceError, match=r"a\.parquet has groups of one sample, .* `tailrace trace fit`"):
        make_setup(write_lengths(tmp_path / "a.parquet", [[[1], [2]]]), recipe, [])


def test_weights_can_be_random_where_there_is_an_architecture(
    tmp_path: Path, recipe: Path, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TAILRACE_CACHE", str(tmp_path / "cache"))
    architecture = tmp_path / "config.json"
    architecture.write_bytes((tiny_model("llama") / "config.json").read_bytes())
    changes = [f"model.path={architecture}"]
    setup = make_setup(write_lengths(tmp_path / "a.parquet"), recipe, changes, weights=random_model)
    model = Path(setup.config.model.path)
    assert (model / "model.safetensors").is_file()
    shutil.copytree(model, model.with_name(f".{model.name}.partial"))
    shutil.rmtree(model)  # as if its writer had died
    assert make_setup(
        write_lengths(tmp_path / "a.parquet"), recipe, changes, weights=random_model
    ).config.model.path == str(model)
    assert (model / "model.safetensors").is_file()
