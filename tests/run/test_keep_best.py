"""The checkpoint that evaluations find the best is kept, through a resume, and a figure that none makes is refused."""

from pathlib import Path
from typing import Any

import pytest

from tailrace.errors import ConfigError
from tailrace.events import read_events
from tailrace.run.keep_best import EvaluationNotes, check_keep_best
from tailrace.run.train import train
from tailrace.trainer.checkpoint import CheckpointStore
from tests.conftest import TinyModel
from tests.helpers.runs import small_run, write_prompts

GREEDY = {"every": 1}
SAMPLED = {"every": 1, "samples": 6}
MATH = {"grader": {"type": "math"}}


def refusal(keep_best: str, sets: list[str], evaluation: dict[str, Any]) -> str:
    """What is said of a metric; empty where it is taken."""
    path = Path("x")
    config = small_run(path, path, path, checkpoint={"keep_best": keep_best}, evaluation=evaluation, rewards=MATH)
    try:
        check_keep_best(config, sets)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("keep_best", "sets", "evaluation"),
    [
        ("eval/accuracy", ["held_out"], GREEDY),
        ("eval/reward", ["held_out"], GREEDY),
        ("eval/reward/brief", ["held_out"], GREEDY),
        ("eval/sampled/pass@4", ["held_out"], SAMPLED),
        ("eval/sampled/maj@6", ["held_out"], SAMPLED),
        ("eval/pass@6", ["held_out"], {**SAMPLED, "greedy": False}),
        ("eval/hard/accuracy", ["held_out", "hard"], GREEDY),
        ("eval/hard/sampled/reward/brief", ["held_out", "hard"], SAMPLED),
    ],
)
def test_a_figure_that_evaluations_make_is_taken(keep_best: str, sets: list[str], evaluation: dict[str, Any]) -> None:
    assert refusal(keep_best, sets, evaluation) == ""


@pytest.mark.parametrize(
    ("keep_best", "sets", "evaluation", "says"),
    [
        ("eval/acuracy", ["held_out"], GREEDY, "do not make; they make eval/accuracy, eval/reward; did you mean"),
        ("eval/pass@4", ["held_out"], GREEDY, "they make eval/accuracy, eval/reward"),
        ("eval/pass@6", ["held_out"], SAMPLED, "did you mean 'eval/sampled/pass@6'?"),
        ("eval/sampled/pass@3", ["held_out"], SAMPLED, "eval/sampled/pass@2"),
        ("eval/hard/accuracy", ["held_out"], GREEDY, "which the run's evaluations do not make"),
        ("eval/accuracy", [], GREEDY, "the run evaluates nothing; set prompts.held_out or prompts.validation"),
    ],
)
def test_a_figure_that_no_evaluation_makes_is_refused_in_one_line(
    keep_best: str, sets: list[str], evaluation: dict[str, Any], says: str
) -> None:
    said = refusal(keep_best, sets, evaluation)
    assert "\n" not in said
    assert said.startswith(f"checkpoint.keep_best is {keep_best}, ")
    assert says in said


@pytest.mark.parametrize("keep_best", ["accuracy", "train/reward", "eval/"])
def test_a_figure_of_something_else_is_refused(keep_best: str) -> None:
    with pytest.raises(ConfigError, match=r"expected the name of a figure of evaluations, such as eval/accuracy"):
        refusal(keep_best, ["held_out"], GREEDY)


def test_the_first_evaluation_tells_of_a_figure_that_the_grader_does_not_make(tmp_path: Path) -> None:
    notes = EvaluationNotes(CheckpointStore(tmp_path, 1, "eval/accuracy"))
    with pytest.raises(ConfigError, match=r"do not make; they make eval/reward, eval/reward_std$"):
        notes.take(0, {"reward": 1.0, "reward_std": 0.0})
    notes = EvaluationNotes(CheckpointStore(tmp_path, 1, "eval/accuracy"))
    notes.take(0, {"accuracy": 0.5, "reward": 1.0})
    notes.take(1, {"reward": 1.0})  # all verdicts have failed this once


def steps_with(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def best_of(run: Path) -> int:
    """The step of the best evaluation of a checkpoint; checkpoints are of the steps 1, 2, …"""
    rewards = {event.step: event.metrics["reward"] for event in read_events(run / "events.jsonl") if is_one(event)}
    return max((reward, step) for step, reward in rewards.items() if step)[1]


def is_one(event: Any) -> bool:
    return bool(event.task == "evaluation")


def test_a_run_keeps_its_best_checkpoint_through_a_resume(
    tmp_path: Path, tiny_model: TinyModel, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl")
    for steps in (4, 6):
        config = small_run(
            tmp_path / "run",
            tiny_model("llama"),
            prompts,
            checkpoint={"every": 1, "keep": 1, "keep_best": "eval/reward"},
            evaluation={"every": 1},
            trainer__steps=steps,
            trainer__lr=3e-2,
        )
        assert train(config, resume=steps > 4) == 0
        best = best_of(tmp_path / "run")
        assert steps_with(tmp_path / "run") == sorted({f"step_{best:06d}", f"step_{steps:06d}"})
        assert f"Best:   {tmp_path}/run/checkpoints/step_{best:06d} (eval/reward " in capsys.readouterr().out


def test_a_run_without_prompts_to_evaluate_has_no_best_checkpoint(tmp_path: Path, tiny_model: TinyModel) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl")
    config = small_run(
        tmp_path / "run",
        tiny_model("llama"),
        prompts,
        prompts__held_out=0,
        checkpoint={"keep_best": "eval/accuracy"},
    )
    with pytest.raises(ConfigError, match=r"checkpoint.keep_best is eval/accuracy, and the run evaluates nothing"):
        train(config, resume=False)
    assert not (tmp_path / "run").exists()
