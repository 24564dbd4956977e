"""The commands as a person uses them: their output and exit codes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tailrace.config.algorithm import GrpoConfig
from tailrace.config.load import load_config
from tailrace.config.run import RunConfig
from tailrace.run.train import train
from tests.conftest import Command, TinyModel
from tests.helpers.runs import small_run, write_prompts


def tailrace(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tailrace", *arguments], capture_output=True, text=True, timeout=120, check=False
    )


@pytest.fixture
def config(tmp_path: Path, tiny_model: TinyModel) -> RunConfig:
    return small_run(tmp_path / "run", tiny_model("llama"), write_prompts(tmp_path / "p.jsonl"), trainer__steps=1)


@pytest.fixture
def recipe(tmp_path: Path, config: RunConfig) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    return path


@pytest.mark.parametrize(
    "command", [[], ["train"], ["generate"], ["eval"], ["export"], ["profile", "engine"], ["profile", "tp"], ["report"]]
)
def test_help_names_the_commands_and_options(command: list[str]) -> None:
    done = tailrace(*command, "--help")
    assert done.returncode == 0
    assert "Usage" in done.stdout


def test_a_mistake_is_one_line_on_stderr_and_exit_code_2(recipe: Path) -> None:
    done = tailrace("train", str(recipe), "trainer.lrr=1")
    assert done.returncode == 2
    assert done.stderr == f"tailrace: {recipe}: unknown key trainer.lrr; did you mean trainer.lr?\n"
    assert done.stdout == ""


def test_a_dry_run_prints_the_resolved_recipe_with_an_estimate_and_starts_nothing(
    recipe: Path, config: RunConfig, tailrace_here: Command
) -> None:
    done = tailrace_here("train", str(recipe), "trainer.lr=0.5", "--dry-run")
    assert done.returncode == 0, done.stderr
    printed = load_config(yaml.safe_load(done.stdout))
    changed = config.model_copy(update={"trainer": config.trainer.model_copy(update={"lr": 0.5})})
    assert printed == changed.resolved
    assert isinstance(printed.algorithm, GrpoConfig)
    assert printed.algorithm.rollout_correction is not None
    comments = [line for line in done.stdout.splitlines() if line.startswith("#")]
    for said in ("memory: about", "at the worst instant, the", "disk:", " s a step, ", "time rests on"):
        assert any(said in line for line in comments), said
    assert sum(not line.startswith("#   ") for line in comments) < 12, "one page beside the recipe"
    assert not Path(config.output_dir).exists()


def test_a_dry_run_shows_a_prompt_as_the_model_reads_it(
    tmp_path: Path, tiny_model: TinyModel, tailrace_here: Command
) -> None:
    rows = [{"prompt": "\x1b[31mred\nline", "answer": ""}]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = small_run(tmp_path / "run", tiny_model("llama"), tmp_path / "p.jsonl", prompts__held_out=0)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    lines = tailrace_here("train", str(recipe), "--dry-run").stdout.splitlines()
    place = lines.index("# one of them, as the model reads it:")
    assert lines[place + 1 : place + 3] == [r"#   '<user>\x1b[31mred\n'", "#   'line<eos><assistant>'"]


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["prompts.held_out=1000"], "prompts.held_out"),
        (["pipeline.placement=separated", "queue.type=service", "cluster.rollout.cpus=1e6"], "cluster.rollout"),
        (["output_dir=/proc/run"], "output_dir /proc/run"),
        (["queue.type=service", "queue.listen=203.0.113.7"], "queue.listen=203.0.113.7"),
        (["engine.tp=7"], "engine.tp"),
        (["engine.kv_cache_gib=1e-9"], "engine.kv_cache_gib"),
        (["engine.kv_cache_gib=1e-5"], "engine.kv_cache_gib"),
        (["rewards.grader={type: function, path: no_such_module.grade}"], "rewards.grader.path"),
        (["rewards.grader={type: function, path: tests.test_cli.no_such_function}"], "rewards.grader.path"),
        (["rewards.grader={type: math}", "prompts.source.answer_column=null"], "prompts.source.answer_column"),
        (["queue.type=remote", "queue.connection=nowhere/connection.json"], "nowhere/connection.json"),
    ],
)
def test_a_dry_run_finds_what_is_wrong_with_the_input(
    recipe: Path, overrides: list[str], named: str, tailrace_here: Command
) -> None:
    done = tailrace_here("train", str(recipe), *overrides, "--dry-run")
    assert (done.returncode, done.stdout) == (2, "")
    assert named in done.stderr
    assert done.stderr.count("\n") == 1


def test_report_names_the_pages_it_wrote(config: RunConfig) -> None:
    train(config, resume=False)
    run = Path(config.output_dir)
    (run / "report.html").unlink()
    done = tailrace("report", str(run))
    assert done.stdout.split() == [str(run / "report.html"), str(run / "trace.json")]
    assert (run / "report.html").stat().st_size > 1_000_000


def test_report_of_a_directory_without_a_run_is_one_line(tmp_path: Path) -> None:
    done = tailrace("report", str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
