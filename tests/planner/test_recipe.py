"""Claims on the recipes that plans are written as."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tailrace.commands.dry_run import print_plan
from tailrace.config.engine import NativeEngineConfig
from tailrace.config.load import load_config, parse_as
from tailrace.config.model import ModelConfig
from tailrace.config.run import RunConfig
from tailrace.errors import ModelNotHere
from tailrace.planner.candidates import Candidates
from tailrace.planner.given import given
from tailrace.planner.modes import USUAL, Mode
from tailrace.planner.problem import Problem
from tailrace.planner.recipe import recipe_text
from tailrace.planner.trial import config_of, simulate
from tailrace.planning.hardware.clusters import open_cluster
from tailrace.planning.model_shape.catalogue import find_shape
from tailrace.workloads.samplers.factory import open_workload
from tests.conftest import TinyModel
from tests.helpers.reward_models import write_reward_model
from tests.helpers.runs import small_run, write_prompts


def values_of(tmp_path: Path, model: Path, **changes: Any) -> dict[str, Any]:
    run = small_run(tmp_path / "run", model, write_prompts(tmp_path / "prompts.jsonl"), sampling__max_new_tokens=99_999)
    return {**run.model_dump(mode="json", exclude_unset=True), **changes}


def written(
    values: Mapping[str, Any], mode: Mode, tmp_path: Path, cluster: str = "16xH100", *, model: str | None = None
) -> Path:
    config = parse_as(RunConfig, values, source="test")
    problem = Problem.of(config, find_shape("Qwen2.5-7B"), open_cluster(cluster), open_workload("math-32b"), steps=1)
    candidate = min(Candidates(problem).of(mode), key=lambda one: one.bound.seconds)
    path = tmp_path / "plan.yaml"
    path.write_text(recipe_text(values, problem, simulate(problem, candidate), model=model))
    return path


@pytest.mark.parametrize("mode", USUAL, ids=str)
def test_a_written_recipe_is_accepted_by_a_dry_run(
    mode: Mode, tmp_path: Path, tiny_model: TinyModel, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(values_of(tmp_path, tiny_model("llama")), mode, tmp_path)
    config = load_config(path, ["device=cpu", "engine.kv_cache_gib=0.01", "sampling.max_new_tokens=12"])
    assert Mode.of(config.pipeline) == mode
    print_plan(config, resume=False)
    assert "time:" in capsys.readouterr().out


@pytest.mark.parametrize("mode", USUAL, ids=str)
def test_a_written_recipe_with_a_critic_is_accepted_by_a_dry_run(
    mode: Mode, tmp_path: Path, tiny_model: TinyModel, capsys: pytest.CaptureFixture[str]
) -> None:
    ppo, sampling = {"type": "ppo", "group_size": 2}, {"max_new_tokens": 20_000}
    path = written(values_of(tmp_path, tiny_model("llama"), algorithm=ppo, sampling=sampling), mode, tmp_path)
    assert yaml.safe_load(path.read_text()).get("cluster", {}).get("pools", {}).keys() <= {"critic"}
    config = load_config(path, ["device=cpu", "engine.kv_cache_gib=0.01", "sampling.max_new_tokens=12"])
    if not mode.colocated:
        assert config.cluster.pool("critic").gpus >= 1
        assert "Tailrace's own critic has one device, and this plan's has" in path.read_text()
    print_plan(config, resume=False)
    shown = capsys.readouterr().out
    assert "# time: about" in shown
    assert "critic" in "".join(line for line in shown.splitlines() if line.startswith("#   "))
    assert "is not known" not in shown


def test_a_written_recipe_says_what_was_planned(tmp_path: Path, tiny_model: TinyModel) -> None:
    path = written(values_of(tmp_path, tiny_model("llama")), USUAL[3], tmp_path)
    text, recipe = path.read_text(), yaml.safe_load(path.read_text())
    assert text.startswith("# A plan: separated, streaming, staleness 2,")
    assert "Tailrace's own trainer has one device" in text
    assert recipe["pipeline"] == {"placement": "separated", "max_staleness": 2, "streaming": True}
    assert recipe["cluster"]["rollout"]["gpus"] == recipe["engine"]["tp"] * recipe["engine"]["dp"]
    assert recipe["device"] == "cuda"
    assert "threads" not in recipe
    assert recipe["queue"]["max_rows"] >= 3 * recipe["trainer"]["train_batch_size"]


def test_a_written_recipe_is_simulated_where_it_was_planned(tmp_path: Path, tiny_model: TinyModel) -> None:
    values = values_of(tmp_path, tiny_model("llama"))
    values["cluster"] = {"trainer": {"resources": {"big": 1}, "datacentre": "north"}}
    config = parse_as(RunConfig, values, source="test")
    cluster = open_cluster("16xH100+16xH20")
    problem = Problem.of(config, find_shape("Qwen2.5-7B"), cluster, open_workload("math-32b"), steps=1)
    for rollout, trainer in permutations(cluster.pools):
        candidates = Candidates(problem).with_devices(USUAL[2], rollout, trainer, rollout=8, trainer=16)
        plan = simulate(problem, min(candidates, key=lambda one: one.bound.seconds))
        written = parse_as(RunConfig, yaml.safe_load(recipe_text(values, problem, plan)), source="test")
        again = given(replace(problem, config=written)).allocation
        assert [one.pool for one in again.rollout] == [rollout]
        assert again.trainer == trainer
        assert [one.cache_tokens for one in again.rollout] == pytest.approx(
            [plan.candidate.engines.cache_tokens], rel=1e-3
        )
        assert written.cluster.trainer.datacentre is None
        assert written.cluster.trainer.resources.keys() == {f"accelerator_type:{trainer.kind}"}


NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")


@NO_GPU
@pytest.mark.parametrize("mode", USUAL, ids=str)
def test_a_machine_without_a_gpu_says_what_it_cannot_check(
    mode: Mode, tmp_path: Path, tiny_model: TinyModel, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(values_of(tmp_path, tiny_model("llama")), mode, tmp_path)
    print_plan(load_config(path, ["sampling.max_new_tokens=12"]), resume=False)
    shown = capsys.readouterr().out
    assert "# not checked: device 'cuda' cannot be used here" in shown
    assert "# memory: about" in shown
    assert "time:" not in shown


@NO_GPU
def test_without_a_gpu_a_reward_model_of_one_is_not_asked_for_scores(
    tmp_path: Path, tiny_model: TinyModel, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_reward_model(tmp_path / "reward model")
    grader = {"type": "reward_model", "path": str(model), "device": "cuda"}
    values = values_of(
        tmp_path, tiny_model("llama"), rewards={"grader": grader}, device="cuda", sampling={"max_new_tokens": 12}
    )
    print_plan(parse_as(RunConfig, values, source="test"), resume=False)
    assert "# not checked: the reward model's device 'cuda' cannot be used here" in capsys.readouterr().out


@NO_GPU
def test_the_model_that_was_planned_for_is_the_recipes_and_need_not_be_here(
    tmp_path: Path, tiny_model: TinyModel, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tailrace.models.resolve._download", _not_here)
    path = written(values_of(tmp_path, tiny_model("llama")), USUAL[3], tmp_path, model="Qwen/Qwen2.5-7B")
    config = load_config(path)
    assert config.model.path == "Qwen/Qwen2.5-7B"
    print_plan(config, resume=False)
    shown = capsys.readouterr().out
    assert "# model: Qwen2.5-7B, 7616M parameters" in shown
    assert "# not checked: Qwen/Qwen2.5-7B is not here" in shown


def _not_here(config: ModelConfig, key: str) -> Path:
    raise ModelNotHere(f"{key}.path {config.path!r}: no hub")


def test_a_reward_model_that_is_not_here_is_not_taken_for_the_model(
    tmp_path: Path, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tailrace.models.resolve._download", _not_here)
    rewards = {"grader": {"type": "reward_model", "path": "nobody/rm"}}
    config = parse_as(RunConfig, values_of(tmp_path, tiny_model("llama"), rewards=rewards), source="test")
    with pytest.raises(ModelNotHere, match=r"^rewards\.grader\.path 'nobody/rm'"):
        print_plan(config, resume=False)


def test_a_model_that_nobody_knows_is_still_refused(
    tmp_path: Path, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tailrace.models.resolve._download", _not_here)
    path = written(values_of(tmp_path, tiny_model("llama")), USUAL[3], tmp_path, model="nobody/nothing")
    with pytest.raises(ModelNotHere):
        print_plan(load_config(path), resume=False)


def test_the_arrangement_of_a_trainer_is_told_to_it(tmp_path: Path, tiny_model: TinyModel) -> None:
    values = values_of(tmp_path, tiny_model("llama"))
    text = written(values, USUAL[3], tmp_path).read_text()
    assert "#     backend: {type: adapter, path: my_trainer.MyTrainer, options: {layout: {tp: " in text
    values["trainer"]["backend"] = {"type": "adapter", "path": "mine.Trainer", "options": {"fast": True}}
    recipe = yaml.safe_load(written(values, USUAL[3], tmp_path).read_text())
    backend = recipe["trainer"]["backend"]
    assert backend["options"]["fast"]
    assert {"tp", "pp", "dp", "sharding", "checkpointing", "offload"} <= backend["options"]["layout"].keys()
    assert recipe["trainer"]["gradient_checkpointing"] == (backend["options"]["layout"]["checkpointing"] == "full")


def test_the_tp_degrees_of_a_written_recipe_divide_its_ranks(tmp_path: Path, tiny_model: TinyModel) -> None:
    own = {"type": "native", "dp": 16, "adaptive_tp": {"degrees": [1, 2, 4, 8, 16]}}
    values = values_of(tmp_path, tiny_model("llama"), engine=own)
    engine = load_config(written(values, USUAL[3], tmp_path)).engine
    assert isinstance(engine, NativeEngineConfig)
    assert engine.ranks < 16
    kept = () if engine.adaptive_tp is None else engine.adaptive_tp.degrees
    assert kept == tuple(degree for degree in (1, 2, 4, 8) if engine.ranks > 1 and engine.ranks % degree == 0)


def test_a_queue_of_several_controllers_has_room_for_whole_groups(tmp_path: Path, tiny_model: TinyModel) -> None:
    queue = {"type": "service", "controllers": 3, "units": 3, "max_rows": 33}
    values = values_of(tmp_path, tiny_model("llama"), queue=queue)
    values |= {"pipeline": {"placement": "separated"}}
    values.pop("threads", None)
    mode = next(mode for mode in USUAL if mode.max_staleness)
    config = load_config(written(values, mode, tmp_path))
    assert config.queue.type == "service"
    assert config.queue.max_rows >= config.least_rows(mode.max_staleness)


def test_each_of_several_graders_has_the_workers_of_the_plan(tmp_path: Path, tiny_model: TinyModel) -> None:
    graders = {
        "right": {"grader": {"type": "exact"}, "workers": 3},
        "short": {"grader": {"type": "regex", "pattern": "x"}, "workers": 5},
    }
    values = values_of(tmp_path, tiny_model("llama"), rewards={"graders": graders})
    config = load_config(written(values, USUAL[3], tmp_path))
    assert {name: grading.workers for name, grading in config.rewards.graders.items()} == {"right": 3, "short": 5}
    assert config.grading_places == 3
    assert config.with_grading_places(4).grading_places == 4


def test_reward_workers_share_the_places_of_a_plan(tmp_path: Path, tiny_model: TinyModel) -> None:
    values = values_of(tmp_path, tiny_model("llama"), rewards={"grader": {"type": "exact"}, "workers": 2})
    values |= {"pipeline": {"placement": "separated"}, "queue": {"type": "service"}}
    values["cluster"] = {"reward": {"workers": 4}}
    values.pop("threads", None)
    config = load_config(values)
    assert config.grading_places == 8
    assert config.with_grading_places(10).rewards.workers == 3
    together = load_config({**values, "pipeline": {}})
    assert together.grading_places == 2


def test_a_judge_needs_no_process_for_each_of_its_requests(tmp_path: Path, tiny_model: TinyModel) -> None:
    judge = {"type": "judge", "url": "http://127.0.0.1:9/v1", "model": "m", "concurrency": 16}
    config = load_config(values_of(tmp_path, tiny_model("llama"), rewards={"grader": judge, "workers": 2}))
    assert config.grading_places == 32
    assert config.with_grading_places(100).rewards.workers == 7


def test_what_the_mode_does_not_allow_is_left_out(tmp_path: Path, tiny_model: TinyModel) -> None:
    values = values_of(tmp_path, tiny_model("llama"))
    values["pipeline"] = {"placement": "separated", "streaming": True, "in_order": True}
    values["weights"] = {"mode": "delayed"}
    values["queue"] = {"type": "service"}
    values.pop("threads")
    path = written(values, USUAL[0], tmp_path)
    assert Mode.of(load_config(path).pipeline) == USUAL[0]


def test_a_simulated_recipe_has_the_mode_of_its_candidate(tmp_path: Path, tiny_model: TinyModel) -> None:
    values = values_of(tmp_path, tiny_model("llama"))
    config = parse_as(RunConfig, values, source="test")
    problem = Problem.of(config, find_shape("Qwen2.5-7B"), open_cluster("8xH100"), open_workload("math-32b"), steps=1)
    candidate = Candidates(problem).of(USUAL[2])[0]
    changed = config_of(config, candidate)
    assert Mode.of(changed.pipeline) == USUAL[2]
    assert changed.weights_mode == "in_flight"
