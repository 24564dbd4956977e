"""`tailrace eval` and `tailrace export`, on a run of a tiny model whose checkpoint is narrower than its engine."""

import json
import os
import re
import shutil
import signal
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tailrace.commands.export import export, find_checkpoint
from tailrace.conformance.tiny import write_tiny_model
from tailrace.errors import CheckpointError, TailraceWarning, UserError, counted
from tailrace.events import read_events
from tailrace.run.directory import RunDirectory
from tailrace.run.evaluation import Answer, Evaluator
from tailrace.run.train import train
from tailrace.trainer.checkpoint import CheckpointStore
from tests.conftest import Command
from tests.helpers.runs import small_run, steps_of, write_prompts

RECIPE = "config.yaml"
GREEDY = ["evaluation.samples=0", "evaluation.temperature=null"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps, with a checkpoint and an evaluation after each, on held-out and validation prompts."""
    directory = tmp_path_factory.mktemp("evaluated")
    model = write_tiny_model("llama", directory / "tiny")
    AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).save_pretrained(model)
    validation = write_prompts(directory / "v.jsonl", 5)
    config = small_run(
        directory / "run",
        model,
        write_prompts(directory / "p.jsonl"),
        prompts__validation={"mine": {"type": "jsonl", "path": str(validation)}},
        prompts__split_seed=11,  # holds out none of the validation prompts
        rewards__correct_at=0.01,
        trainer__steps=2,
        trainer__lr=1e-2,
        checkpoint={"every": 1, "keep": 5},
        evaluation={"every": 1, "samples": 3, "temperature": 0.8},
    )
    assert train(config, resume=False) == 0
    return directory / "run"


def evaluations(run: Path) -> list[dict[str, float]]:
    return [event.metrics for event in read_events(run / "events.jsonl") if event.task == "evaluation"]


def test_the_exported_model_does_what_the_last_evaluation_says(run: Path, tailrace_here: Command) -> None:
    told = tailrace_here("eval", str(run), "--json")
    assert told.returncode == 0, told.stderr
    result = json.loads(told.stdout)
    assert result["figures"] == evaluations(run)[-1]
    assert 0 < result["figures"]["sampled/accuracy"] < 1
    assert result["prompts"] == {"held_out": 4, "mine": 5}
    assert result["answers"] == 9 * 4
    low, high = result["intervals_95"]["mine/sampled/pass@3"]
    assert 0 <= low <= result["figures"]["mine/sampled/pass@3"] <= high <= 1
    assert load_file(run / "model" / "model.safetensors").popitem()[1].dtype == torch.float32


def test_a_checkpoint_does_what_the_evaluation_of_its_step_says(
    run: Path, tmp_path: Path, tailrace_here: Command
) -> None:
    output = tmp_path / "answers.jsonl"
    told = tailrace_here("eval", str(run), "--step", "1", "--output", str(output), *GREEDY, "--json")
    assert told.returncode == 0, told.stderr
    result = json.loads(told.stdout)
    assert result["model"] == f"{run} at step 1"
    greedy = result["figures"]
    assert greedy == {name: value for name, value in evaluations(run)[1].items() if "sampled" not in name}
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert {(line["set"], line["way"]) for line in lines} == {("held_out", "greedy"), ("mine", "greedy")}
    assert greedy["reward"] == pytest.approx(sum(line["reward"] for line in lines) / 9)
    again = tailrace_here("eval", str(run), "--output", str(output))
    assert again.returncode == 2
    assert "exists; give another file, or replace it with --force" in again.stderr


def test_a_file_takes_the_place_of_all_prompts_of_the_recipe(run: Path, tmp_path: Path, tailrace_here: Command) -> None:
    prompts = write_prompts(tmp_path / "mine.jsonl", 3)
    told = tailrace_here("eval", str(run), "--prompts", str(prompts), "--samples", "2", "evaluation.greedy=false")
    assert told.returncode == 0, told.stderr
    assert f"{run}/model: 6 answers to 3 of source" in told.stdout
    assert "pass@2" in told.stdout
    assert "sampled/" not in told.stdout  # an evaluation that is the only one has no prefix


def test_the_bound_of_a_recipe_is_for_its_own_prompts(run: Path, tmp_path: Path, tailrace_here: Command) -> None:
    recipe = tmp_path / "bounded.yaml"
    recipe.write_text(yaml.safe_dump(yaml.safe_load((run / RECIPE).read_text()) | {"evaluation": {"max_prompts": 2}}))
    prompts = write_prompts(tmp_path / "mine.jsonl", 5)
    for given in (["--prompts", str(prompts)], [str(prompts)]):
        for bound, answered in ([], 5), (["evaluation.max_prompts=3"], 3):
            told = tailrace_here("eval", str(run), "--recipe", str(recipe), *given, *bound, *GREEDY, "--json")
            assert told.returncode == 0, told.stderr
            assert sum(json.loads(told.stdout)["prompts"].values()) == answered


def test_several_tasks_take_the_place_of_the_recipes_prompts(run: Path, tmp_path: Path, tailrace_here: Command) -> None:
    mine = write_prompts(tmp_path / "mine.jsonl", 3)
    tasks = [str(mine), "reasoning_gym:chain_sum,size=2"]
    told = tailrace_here("eval", str(run), *tasks, *GREEDY, "prompts.validation.chain_sum.seed=5", "--json")
    assert told.returncode == 0, told.stderr
    result = json.loads(told.stdout)
    assert result["prompts"] == {"mine": 3, "chain_sum": 2}
    assert {"reward", "mine/reward", "chain_sum/reward"} <= result["figures"].keys() & result["intervals_95"].keys()
    table = tailrace_here("eval", str(run), *tasks, *GREEDY).stdout.splitlines()
    assert table[0] == f"{run}/model: 5 answers to 3 of mine, 2 of chain_sum"
    headings = [line.strip() for line in table[2:] if not line.startswith("  ")]
    assert headings == ["all", "mine", "chain_sum"]
    assert sum(line.startswith("  reward ") for line in table) == 3


def test_a_model_needs_no_recipe_for_tasks_that_come_with_their_scorer(run: Path, tailrace_here: Command) -> None:
    task = ["reasoning_gym:chain_sum,size=2", "reasoning_gym:basic_arithmetic,size=1"]
    engine = ["engine.dtype=float32", "engine.kv_cache_gib=0.01", "sampling.max_new_tokens=4"]
    told = tailrace_here("eval", str(run / "model"), *task, *engine, "--samples", "2", "--json")
    assert told.returncode == 0, told.stderr
    result = json.loads(told.stdout)
    assert (result["prompts"], result["answers"]) == ({"chain_sum": 2, "basic_arithmetic": 1}, 9)
    assert {"accuracy", "basic_arithmetic/sampled/pass@2"} <= result["figures"].keys()


def test_a_model_is_evaluated_with_a_training_recipe(run: Path, tailrace_here: Command) -> None:
    told = tailrace_here("eval", str(run / "model"), "--recipe", str(run / RECIPE), "--json")
    assert json.loads(told.stdout)["figures"] == evaluations(run)[-1]


def test_ctrl_c_keeps_what_is_graded(
    run: Path, tmp_path: Path, tailrace_here: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    graded = Evaluator._graded

    async def interrupted(self: Evaluator, sample: Any, groups: Any, each: Any) -> Answer:
        answer = await graded(self, sample, groups, each)
        if sample.request_id == -1:
            os.kill(os.getpid(), signal.SIGINT)
        return answer

    monkeypatch.setattr(Evaluator, "_graded", interrupted)
    output = tmp_path / "answers.jsonl"
    told = tailrace_here("eval", str(run), "--output", str(output), "evaluation.samples=50")
    kept = len(output.read_text().splitlines())
    assert told.returncode == 130
    assert 1 <= kept < 9 * 51
    assert f"these are the {counted(kept, 'answer')} that were graded" in told.stderr
    assert f"{kept} answer" in told.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["RUN", "--step", "7"], "has no checkpoint of step 7; it has those of 1, 2"),
        (["MODEL"], "is not the directory of a run, and there are no prompts: give that directory, tasks such as"),
        (["MODEL", "MINE"], "graded; give rewards.grader.type, such as math or exact, or a recipe with --recipe"),
        (["RUN", "hard"], "the task 'hard' is no source of prompts; give a .jsonl or .parquet file"),
        (["RUN", "MINE", "--prompts", "MINE"], "give the file as a task, too"),
        (["RUN", "MINE", "--output", "MINE", "--force"], "is an input of this command; give another file"),
        (["RUN", "reasoning_gym:chain_sums"], "is none of reasoning-gym's"),
        (["RUN", "--prompts", "MINE", "--output", "MINE", "--force"], "is an input of this command; give another file"),
        (["RUN", "--output", "CONFIG", "--force"], "is an input of this command; give another file"),
        (["MODEL", "--step", "1", "--recipe", "CONFIG"], "--step 1 is for the directory of a run"),
        (["MODEL", "--prompts", "MINE"], "rewards is required and missing"),
        (["RUN", "trainer.lr=1"], "trainer.lr is for training, and this command trains nothing; leave it out"),
        (["RUN", "prompts.shuffle=false"], "prompts.shuffle is for training"),
        (["RUN", "prompts.held_out=0", "prompts.validation=null"], "prompts.validation is null"),
        (["RUN", "--prompts", "NONE"], "cannot read prompts.source.path"),
        (["RUN", "--prompts", "MINE", "prompts.source.answer_column=x"], "(prompts.source.answer_column)"),
        (["RUN", "--prompts", "MINE", "prompts.validation.a.path=x"], "leave prompts.validation out"),
        (["RUN", "--samples", "-1"], "evaluation.samples is -1"),
        (["seed=3"], "MODEL is missing before 'seed=…'"),
        (["nowhere/at/all", "--recipe", "CONFIG"], "does not exist"),
    ],
)  # fmt: skip
def test_what_cannot_be_evaluated_is_one_line(
    run: Path, tmp_path: Path, tailrace_here: Command, arguments: Sequence[str], message: str
) -> None:
    names = {
        "RUN": str(run),
        "MODEL": str(run / "model"),
        "CONFIG": str(run / RECIPE),
        "MINE": str(write_prompts(tmp_path / "mine.jsonl", 3)),
        "NONE": str(tmp_path / "none.jsonl"),
    }
    told = tailrace_here("eval", *(names.get(argument, argument) for argument in arguments))
    assert (told.returncode, told.stdout) == (2, "")
    assert message in told.stderr
    assert len([line for line in told.stderr.splitlines() if line.startswith("tailrace: ")]) == 1


def test_generate_takes_a_training_recipe_but_not_its_prompts(run: Path, tailrace_here: Command) -> None:
    told = tailrace_here("generate", "--recipe", str(run / RECIPE), "n1", "sampling.temperature=0")
    assert told.returncode == 0, told.stderr
    (line,) = [json.loads(line) for line in told.stdout.splitlines()]
    assert (line["prompt"], line["tokens"]) == ("<user>n1<eos><assistant>", 12)
    assert "there are no prompts" in tailrace_here("generate", "--recipe", str(run / RECIPE)).stderr
    refused = tailrace_here("generate", "--recipe", str(run / RECIPE), "n1", "rewards.workers=3")
    assert "rewards.workers is for training, and this command trains nothing" in refused.stderr


def test_an_export_of_a_checkpoint_loads_with_its_tokenizer(run: Path, tmp_path: Path, tailrace_here: Command) -> None:
    told = tailrace_here("export", str(run), "--step", "1", "--output", str(tmp_path / "m"))
    assert (told.returncode, told.stdout.strip()) == (0, str(tmp_path / "m"))
    assert len({path.stat().st_mode for path in (tmp_path / "m").iterdir()}) == 1, "others may read some of the model"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    saved = load_file(run / "checkpoints" / "step_000001" / "weights.safetensors")
    assert all(torch.equal(saved[name], value.detach()) for name, value in model.named_parameters())
    assert AutoTokenizer.from_pretrained(tmp_path / "m").chat_template


def test_the_newest_checkpoint_is_the_exported_model(run: Path, tmp_path: Path) -> None:
    ours, theirs = (
        load_file(export(run, output=tmp_path / "m") / "model.safetensors"),
        load_file(run / "model" / "model.safetensors"),
    )
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_nothing_is_replaced_by_an_export_unless_forced(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model exists; give another directory with --output, or replace it with"):
        export(run)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("mine")
    with pytest.raises(UserError, match=r"is no model directory, so it is not replaced"):
        export(run, output=tmp_path / "notes", force=True)
    assert (tmp_path / "notes" / "a.txt").read_text() == "mine"


def test_what_cannot_be_exported_is_told_with_what_there_is(run: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no checkpoint of step 9; it has those of 1, 2"):
        export(run, step=9, output=tmp_path / "m")
    with pytest.raises(UserError, match=r"is no directory of a run: it has no config.yaml"):
        export(tmp_path)
    assert not (tmp_path / "m").exists()


def test_a_checkpoint_that_the_run_has_left_behind_is_not_exported(run: Path, tmp_path: Path) -> None:
    checkpoints = RunDirectory(run).checkpoints
    copied = tmp_path / "run"
    shutil.copytree(checkpoints, copied / "checkpoints")
    (copied / "checkpoints" / ".partial-step_000003-0").mkdir()
    store = CheckpointStore(copied / "checkpoints", keep=2)
    first, second = store.list()
    store.go_on_from(first)
    assert find_checkpoint(RunDirectory(copied), None) == find_checkpoint(RunDirectory(copied), 1) == first
    says = f"has no checkpoint of step 2; it has those of 1; {second} is of an attempt that the run has left behind"
    with pytest.raises(CheckpointError, match=re.escape(says)):
        find_checkpoint(RunDirectory(copied), 2)
    with pytest.raises(CheckpointError, match=r"has no checkpoint of step 3; it has those of 1$"):
        find_checkpoint(RunDirectory(copied), 3)
    store.go_on_from(None)
    with pytest.raises(CheckpointError, match=rf"has no checkpoint yet; {re.escape(str(second))} is of an attempt"):
        find_checkpoint(RunDirectory(copied), None)


def test_a_run_branches_off_the_checkpoint_of_another_one(run: Path, tmp_path: Path, tailrace_here: Command) -> None:
    checkpoint = run / "checkpoints" / "step_000001"
    branch = tmp_path / "branch"
    more = ["trainer.lr=1e-4", f"output_dir={branch}", "--resume-from", str(checkpoint)]
    told = tailrace_here("train", str(run / RECIPE), *more)
    assert told.returncode == 0, told.stderr
    assert [event.step for event in steps_of(branch)] == [1]
    assert sorted(path.name for path in (branch / "checkpoints").iterdir()) == ["step_000002"]
    assert evaluations(branch)[0] == evaluations(run)[1]
    assert steps_of(run)[-1].metrics["lr"] == pytest.approx(1e-2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["seed=3"], "seed cannot change when a run is resumed"),
        (["prompts.held_out=3"], "prompts.held_out cannot change"),
        (["--resume-from", "NOWHERE"], "NOWHERE is not a directory"),
        (["--resume-from", "RUN"], "is a run, and no checkpoint; its newest is "),
        (
            ["trainer.steps=0"],
            "trainer.steps is 0, which trains nothing; to evaluate the model as it is: tailrace eval",
        ),
    ],
)
def test_a_branch_that_cannot_begin_leaves_nothing(
    run: Path, tmp_path: Path, tailrace_here: Command, arguments: list[str], message: str
) -> None:
    checkpoint = ["--resume-from", str(run / "checkpoints" / "step_000001")]
    arguments = [str(run) if argument == "RUN" else argument for argument in arguments]
    given = arguments if arguments[0] == "--resume-from" else [*arguments, *checkpoint]
    told = tailrace_here("train", str(run / RECIPE), f"output_dir={tmp_path / 'branch'}", *given)
    assert told.returncode == 2
    assert message in told.stderr
    assert "--resume" not in told.stderr.replace("--resume-from", "")
    assert not (tmp_path / "branch").exists()


def test_answers_that_no_response_can_equal_are_told_of(run: Path, tmp_path: Path, tailrace_here: Command) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "a", "answer": "So\\n#### 4"}\n' * 2)
    given = [
        "--prompts",
        str(tmp_path / "p.jsonl"),
        "rewards.grader={type: regex, pattern: '[0-9]+'}",
        "rewards.correct_at=null",
        *GREEDY,
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("default", TailraceWarning)
        told = tailrace_here("eval", str(run), *given)
    assert told.returncode == 0, told.stderr
    assert "tailrace: warning: 2 of 2 answers of prompts.source that were looked at can never be what" in told.stderr


def test_an_evaluation_that_cannot_grade_anything_fails(run: Path, tailrace_here: Command) -> None:
    told = tailrace_here("eval", str(run), "rewards.grader.path=tests.helpers.graders.undefined", *GREEDY)
    assert (told.returncode, told.stdout) == (1, "")
    assert "NameError: name .answr. is not defined" in told.stderr.replace("'", ".")
