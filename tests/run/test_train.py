"""Whole runs of every mode learn, resume and stop cleanly."""

import asyncio
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from tailrace.config.run import RunConfig
from tailrace.errors import ConfigError, NonFiniteError, NothingGraded, TailraceWarning, UserError
from tailrace.events import Event, EventLog, read_events
from tailrace.host.interrupt import Interrupt
from tailrace.report.samples import read_samples
from tailrace.report.trace_sink import trace_of_run
from tailrace.rewards.pool import GraderPool
from tailrace.run.directory import RunDirectory
from tailrace.run.train import train
from tailrace.trainer.backends.single import SingleTrainer
from tailrace.trainer.base import UpdateResult
from tailrace.workloads.files import read_trace
from tests.conftest import TinyModel
from tests.helpers.runs import assert_same_run, small_run, steps_of, weights, write_prompts


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write_prompts(tmp_path / "prompts.jsonl")


def test_a_tiny_model_learns_its_task(tmp_path: Path, tiny_model: TinyModel, prompts: Path) -> None:
    config = small_run(
        tmp_path / "run",
        tiny_model("llama"),
        prompts,
        algorithm={"type": "grpo", "group_size": 8},
        trainer={"steps": 15, "train_batch_size": 32, "precision": "bf16", "lr": 3e-3},
        engine={"type": "native", "dtype": "bfloat16", "kv_cache_gib": 0.01},
        evaluation={"every": 15},
    )
    assert train(config, resume=False) == 0
    rewards = [event.metrics["reward"] for event in steps_of(tmp_path / "run")]
    assert sum(rewards[-5:]) >= 2 * sum(rewards[:5])
    before, after = [e for e in read_events(tmp_path / "run" / "events.jsonl") if e.task == "evaluation"]
    assert after.metrics["reward"] > before.metrics["reward"]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_run_exports_a_model_that_transformers_loads(
    tmp_path: Path, tiny_model: TinyModel, prompts: Path, family: str
) -> None:
    run = tmp_path / "run"
    train(small_run(run, tiny_model(family), prompts, trainer__steps=1), resume=False)
    model = AutoModelForCausalLM.from_pretrained(run / "model")
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    initial = AutoModelForCausalLM.from_pretrained(tiny_model(family))
    assert any(not torch.equal(a, b) for a, b in zip(model.parameters(), initial.parameters(), strict=True))
    assert tokenizer("n1")["input_ids"]
    assert {path.name for path in run.iterdir()} >= {"report.html", "trace.json", "events.jsonl", "config.yaml"}


def test_a_colocated_run_says_where_the_time_of_engine_graders_and_trainer_goes(
    tmp_path: Path, tiny_model: TinyModel, prompts: Path
) -> None:
    train(small_run(tmp_path / "run", tiny_model("llama"), prompts, trainer__steps=2), resume=False)
    seconds: dict[str, dict[str, float]] = {}
    passed: dict[str, float] = {}
    for event in read_events(tmp_path / "run" / "events.jsonl"):
        if event.task == "activity":
            states = seconds.setdefault(event.actor, dict.fromkeys(event.metrics, 0.0))
            passed[event.actor] = passed.get(event.actor, 0.0) + event.end - event.start
            for state, part in event.metrics.items():
                states[state] += part
    assert seconds.keys() == {"engine", "reward", "trainer"}
    for actor, states in seconds.items():
        assert states["busy"] > 0, actor
        assert states["data"] > 0, actor
        assert sum(states.values()) == pytest.approx(passed[actor])


def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(
    tmp_path: Path, tiny_model: TinyModel, prompts: Path
) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    changes: dict[str, Any] = {"trainer__schedule": "cosine", "algorithm__kl": {"coefficient": 0.01}}
    changes["observe__trace"] = True
    train(small_run(whole, tiny_model("llama"), prompts, **changes), resume=False)
    shutil.copytree(whole, cut)
    shutil.rmtree(cut / "checkpoints" / "step_000004")
    shutil.rmtree(cut / "model")
    train(small_run(cut, tiny_model("llama"), prompts, **changes), resume=True)
    resumed = steps_of(cut)
    assert [event.step for event in resumed] == [0, 1, 2, 3, 2, 3]
    assert_same_run(whole, cut)
    assert read_samples(cut / "samples.jsonl") == read_samples(whole / "samples.jsonl")
    ours, theirs = (read_trace(run / "workload.jsonl").samples for run in (whole, cut))
    assert theirs.equals(trace_of_run(cut).samples)
    assert ours.drop("start", "end", "reward_s").equals(theirs.drop("start", "end", "reward_s"))


def test_a_resumed_run_with_shorter_responses_has_a_trace(tmp_path: Path, tiny_model: TinyModel, prompts: Path) -> None:
    run, changes = tmp_path / "run", {"observe__trace": True, "sampling__ignore_eos": True}
    train(
        small_run(run, tiny_model("llama"), prompts, trainer__steps=2, sampling__max_new_tokens=8, **changes),
        resume=False,
    )
    train(
        small_run(run, tiny_model("llama"), prompts, trainer__steps=3, sampling__max_new_tokens=4, **changes),
        resume=True,
    )
    trace = trace_of_run(run)
    assert trace.provenance.max_new_tokens == 8
    assert set(trace.samples["response_tokens"]) == {4, 8}
    assert read_trace(run / "workload.jsonl").samples.equals(trace.samples)


def test_the_texts_of_as_many_groups_as_asked_for_are_kept_and_0_keeps_none(
    tmp_path: Path, tiny_model: TinyModel, prompts: Path
) -> None:
    for groups in (1, 0):
        observe = {"tensorboard": False, "sample_groups": groups, "sample_characters": 100}
        train(small_run(tmp_path / str(groups), tiny_model("llama"), prompts, observe=observe), resume=False)
    assert not (tmp_path / "0" / "samples.jsonl").exists()
    samples = [record for record in read_samples(tmp_path / "1" / "samples.jsonl") if record.kind == "training"]
    assert [(record.step, record.sample) for record in samples] == [(s, k) for s in (1, 2, 3, 4) for k in range(4)]
    assert all(record.group // 2 == record.step - 1 for record in samples)
    assert all(record.weight_versions == (record.step - 1, record.step - 1) for record in samples)
    assert all(record.answer == re.sub(r"\D", "", record.prompt) for record in samples)
    assert all(0 < record.tokens <= 12 for record in samples)
    assert steps_of(tmp_path / "1")[0].metrics["reward"] == steps_of(tmp_path / "0")[0].metrics["reward"]


@pytest.mark.parametrize("mini_batch_size", [8, 4])
def test_streaming_in_order_equals_synchronous_bit_for_bit(
    tmp_path: Path, tiny_model: TinyModel, prompts: Path, mini_batch_size: int
) -> None:
    modes: dict[str, dict[str, bool]] = {"synchronous": {}, "streaming": {"streaming": True, "in_order": True}}
    for name, pipeline in modes.items():
        config = small_run(
            tmp_path / name, tiny_model("llama"), prompts, pipeline=pipeline, trainer__mini_batch_size=mini_batch_size
        )
        train(config, resume=False)
    assert_same_run(tmp_path / "synchronous", tmp_path / "streaming")
    synchronous, streaming = (read_samples(tmp_path / name / "samples.jsonl") for name in modes)
    assert streaming == synchronous


def test_streaming_in_arrival_order_gives_the_same_update_up_to_rounding(
    tmp_path: Path, tiny_model: TinyModel, prompts: Path
) -> None:
    for name, streaming in {"synchronous": False, "streaming": True}.items():
        config = small_run(
            tmp_path / name, tiny_model("llama"), prompts, pipeline={"streaming": streaming}, trainer__steps=1
        )
        train(config, resume=False)
    ours, theirs = weights(tmp_path / "streaming"), weights(tmp_path / "synchronous")
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-4)


def test_failed_gradings_are_counted_and_leave_the_run_going(
    tmp_path: Path, tiny_model: TinyModel, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rewards = {"grader": {"type": "function", "path": "tests.helpers.graders.fails_on_even_length"}, "workers": 1}
    run = tmp_path / "run"
    changes: dict[str, Any] = {"rewards": rewards, "prompts__held_out": 0}
    train(small_run(run, tiny_model("llama"), prompts, trainer__steps=2, **changes), resume=False)
    failures = sum(event.metrics["reward_failures"] for event in steps_of(run))
    kinds = [
        e.info["failures"] for e in read_events(run / "events.jsonl") if e.task == "reward" and "failures" in e.info
    ]
    assert failures > 0
    assert sum(kind["ArithmeticError"] for kind in kinds) == failures
    assert capsys.readouterr().out.count("grading failed · ArithmeticError: even (") == 1


@pytest.mark.parametrize("held_out", [4, 0])
@pytest.mark.parametrize("failure_reward", [None, 0.0])
def test_a_grader_that_always_fails_ends_the_run_with_its_file_and_line(
    tmp_path: Path,
    tiny_model: TinyModel,
    prompts: Path,
    capsys: pytest.CaptureFixture[str],
    held_out: int,
    failure_reward: float | None,
) -> None:
    grader = {"type": "function", "path": "tests.helpers.graders.undefined"}
    config = small_run(
        tmp_path / "run",
        tiny_model("llama"),
        prompts,
        rewards={"grader": grader, "workers": 1, "failure_reward": failure_reward},
        prompts__held_out=held_out,
    )
    with pytest.raises(NothingGraded, match=r"NameError: name 'answr' is not defined \(tests/.*graders.py, line \d+\)"):
        train(config, resume=False)
    assert "return float(response == answr)" in capsys.readouterr().out
    assert not (tmp_path / "run" / "model").exists()
    kept = read_samples(tmp_path / "run" / "samples.jsonl")
    assert kept, "what nobody could grade is what one wants to look at"
    assert all("NameError" in record.failure for record in kept)


def test_three_non_finite_updates_stop_the_run_with_the_evidence(
    tmp_path: Path, tiny_model: TinyModel, prompts: Path
) -> None:
    run = tmp_path / "run"
    config = small_run(run, tiny_model("llama"), prompts)
    diverging = config.trainer.model_copy(update={"lr": 1e30, "max_grad_norm": 1e30})  # beyond the bounds of a recipe
    config = config.model_copy(update={"trainer": diverging})
    with pytest.raises(NonFiniteError, match=re.escape(str(run / "evidence.json"))):
        train(config, resume=False)
    assert (run / "evidence.json").stat().st_size > 0
    page = (run / "report.html").read_text()
    assert re.search(rf"Failed: \d of 4 steps\. [^<]*{re.escape(str(run / 'evidence.json'))}", page)


def test_ctrl_c_does_not_hide_the_error_of_a_step_that_is_half_done(
    tmp_path: Path,
    tiny_model: TinyModel,
    prompts: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The rest of an unfinished step is not saved either."""
    apply, interrupt, applied = SingleTrainer.apply, Interrupt(), list[UpdateResult]()

    def interrupted_apply(trainer: SingleTrainer) -> UpdateResult:
        if applied:
            interrupt.ask()
            raise NonFiniteError("loss is nan")
        applied.append(apply(trainer))
        return applied[-1]

    monkeypatch.setattr(SingleTrainer, "apply", interrupted_apply)
    run = tmp_path / "run"
    config = small_run(run, tiny_model("llama"), prompts, trainer__mini_batch_size=4)
    with pytest.raises(NonFiniteError, match=re.escape(str(run / "evidence.json"))):
        train(config, resume=False, interrupt=interrupt)
    assert "step 1 has failed in the middle of its update (loss is nan)" in capsys.readouterr().err
    assert list((run / "checkpoints").glob("step_*")) == []


def command(config: RunConfig, recipe: Path, *options: str) -> list[str]:
    recipe.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    return [sys.executable, "-m", "tailrace", "train", str(recipe), *options]


def test_an_interrupted_run_saves_and_goes_on_from_there(tmp_path: Path, tiny_model: TinyModel, prompts: Path) -> None:
    run = tmp_path / "run"
    never = {"checkpoint": {"every": 100}, "evaluation": {"every": 100}}
    steps = 200  # more steps than it makes before it hears of the signal
    config = small_run(run, tiny_model("llama"), prompts, trainer__steps=steps, **never)
    start = command(config, tmp_path / "recipe.yaml")
    with subprocess.Popen(start, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if f"step 2/{steps}" in line:
                process.send_signal(signal.SIGINT)
                break
        said = process.stdout.read()
        assert process.wait(timeout=60) == 130
    assert not (run / "model").exists()
    assert f"\nReport: {run / 'report.html'}\n" in said
    assert f"Interrupted: {len(steps_of(run))} of {steps} steps." in (run / "report.html").read_text()
    end = len(steps_of(run)) + 2
    again = [*start, "--resume", f"trainer.steps={end}"]
    done = subprocess.run(again, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    trained = [event.step for event in steps_of(run) if event.step is not None]
    assert trained == sorted(set(trained)) == list(range(end))


def test_ctrl_c_during_the_export_says_how_to_go_on_with_it(
    tmp_path: Path,
    tiny_model: TinyModel,
    prompts: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run, interrupt = tmp_path / "run", Interrupt()
    config = small_run(run, tiny_model("llama"), prompts, trainer__steps=1)
    with monkeypatch.context() as patched:
        patched.setattr(SingleTrainer, "export", lambda *_, **__: interrupt.ask())
        assert train(config, resume=False, interrupt=interrupt) == 130
    *_, last, report = capsys.readouterr().out.splitlines()
    assert last == f"Interrupted. Go on with: tailrace train {run / 'config.yaml'} --resume"
    assert report == f"Report: {run / 'report.html'}"
    assert not (run / "model").exists()
    assert train(config, resume=True) == 0
    assert (run / "model" / "config.json").exists()


def test_a_run_that_was_finished_is_so_even_if_its_closing_is_interrupted(
    tmp_path: Path,
    tiny_model: TinyModel,
    prompts: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run, interrupt = tmp_path / "run", Interrupt()
    close = GraderPool.__aexit__

    async def interrupted_close(pool: GraderPool, *error: Any) -> None:
        await close(pool, *error)
        interrupt.ask()
        async with asyncio.timeout(10):
            await asyncio.Event().wait()

    monkeypatch.setattr(GraderPool, "__aexit__", interrupted_close)
    config = small_run(run, tiny_model("llama"), prompts, trainer__steps=1)
    assert train(config, resume=False, interrupt=interrupt) == 0
    *_, last = capsys.readouterr().out.splitlines()
    assert last == f"Model:  {run / 'model'}"
    assert (run / "report.html").exists()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model__path": "/nowhere/model"}, "/nowhere/model"),
        ({"prompts__held_out": 24}, "held_out"),
        ({"prompts__max_prompt_tokens": 3}, "tokens"),
        ({"sampling__max_new_tokens": 512}, "leaves no room for a prompt in the context of 512 tokens"),
        ({"rewards__grader": {"type": "function", "path": "tests.helpers.graders.nope"}}, "nope"),
        ({"prompts__source": {"type": "jsonl", "path": "/nowhere.jsonl"}}, "/nowhere.jsonl"),
        ({"device": "cuda:7"}, "cuda:7"),
        ({"engine": {"type": "vllm"}, "sampling__temperature": 0.001}, "vLLM takes 0.01 or more"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(
    tmp_path: Path, tiny_model: TinyModel, prompts: Path, changes: dict[str, Any], expected: str
) -> None:
    run = tmp_path / "run"
    with pytest.raises(UserError) as caught:
        train(small_run(run, tiny_model("llama"), prompts, **changes), resume=False)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not run.exists()


def test_settings_of_workers_that_a_run_does_not_have_are_told_of(
    tmp_path: Path, tiny_model: TinyModel, prompts: Path
) -> None:
    config = small_run(
        tmp_path / "run", tiny_model("llama"), prompts, trainer__steps=1, cluster={"rollout": {"workers": 2}}
    )
    with pytest.warns(TailraceWarning, match=r"placement is colocated, which uses nothing of the recipe's cluster:"):
        assert train(config, resume=False) == 0


def test_a_directory_with_a_run_is_not_overwritten(tmp_path: Path, tiny_model: TinyModel, prompts: Path) -> None:
    config = small_run(tmp_path / "run", tiny_model("llama"), prompts, trainer__steps=1)
    train(config, resume=False)
    with pytest.raises(UserError, match="holds a run already"):
        train(config, resume=False)


def test_a_resumed_run_keeps_what_its_data_position_depends_on(
    tmp_path: Path, tiny_model: TinyModel, prompts: Path
) -> None:
    train(small_run(tmp_path / "run", tiny_model("llama"), prompts, trainer__steps=1), resume=False)
    with pytest.raises(UserError, match="seed cannot change when a run is resumed: it was 0 and is 1"):
        train(small_run(tmp_path / "run", tiny_model("llama"), prompts, seed=1), resume=True)


def test_a_resumed_run_keeps_the_bound_that_its_responses_were_let_in_under(
    tmp_path: Path, tiny_model: TinyModel, prompts: Path
) -> None:
    directory = RunDirectory(tmp_path)

    def with_staleness(value: int) -> RunConfig:
        return small_run(tmp_path, tiny_model("llama"), prompts, pipeline={"max_staleness": value})

    with directory.begun(with_staleness(2), resumed=False):
        pass
    directory.check_same(with_staleness(3))
    with pytest.raises(ConfigError, match=r"max_staleness cannot be lowered from 2 to 0 .* give 2 or more"):
        directory.check_same(with_staleness(0))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: path.write_bytes(b"\0\n" + path.read_bytes()), r"events\.jsonl, line 1, is not an event: "),
        (lambda path: (path.unlink(), path.mkdir()), r"events\.jsonl cannot be read: Is a directory"),
    ],
)
def test_events_that_cannot_be_reported_are_told_of_before_a_run_is_resumed(
    tmp_path: Path, tiny_model: TinyModel, prompts: Path, spoil: Callable[[Path], object], message: str
) -> None:
    run = tmp_path / "run"
    train(small_run(run, tiny_model("llama"), prompts, trainer__steps=1), resume=False)
    spoil(run / "events.jsonl")
    with pytest.raises(UserError, match=message):
        train(small_run(run, tiny_model("llama"), prompts, trainer__steps=2), resume=True)
    assert not (run / "checkpoints" / "step_000002").exists()


def test_a_corrupt_checkpoint_offers_the_one_before(tmp_path: Path, tiny_model: TinyModel, prompts: Path) -> None:
    config = small_run(tmp_path / "run", tiny_model("llama"), prompts)
    train(config, resume=False)
    newest = tmp_path / "run" / "checkpoints" / "step_000004"
    (newest / "queue.msgpack").write_bytes(b"junk")
    with pytest.raises(UserError, match="step_000002"):
        train(config, resume=True)
    assert train(config, resume=True, checkpoint=newest.with_name("step_000002")) == 0


def ended_by(error: BaseException, monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    """Let the next run end by `error` at the first event `task step` of the name `at`, before it saves anything."""

    class Ending(EventLog):
        def forward(self, event: Event) -> None:
            super().forward(event)
            if f"{event.task} {event.step}" == at:
                monkeypatch.undo()
                raise error

    monkeypatch.setattr("tailrace.run.log.EventLog", Ending)


def test_a_run_from_an_older_checkpoint_that_ends_before_it_has_saved_goes_on_from_there(
    tmp_path: Path, tiny_model: TinyModel, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run must not go on from a newer checkpoint, which it has left behind."""
    run = tmp_path / "run"
    older, newer = (run / "checkpoints" / name for name in ("step_000002", "step_000004"))
    config = small_run(run, tiny_model("llama"), prompts)
    train(config, resume=False)
    other = small_run(run, tiny_model("llama"), prompts, trainer__lr=1e-5)
    ended_by(ZeroDivisionError(), monkeypatch, "sample 2")
    with pytest.raises(ZeroDivisionError):
        train(other, resume=True, checkpoint=older)
    assert newer.is_dir()
    train(other, resume=True)
    runs = [event for event in read_events(run / "events.jsonl") if event.task == "run"]
    assert [event.info["resumed_from"] for event in runs] == [None, str(older), str(older)]
    assert [event.step for event in steps_of(run)] == [0, 1, 2, 3, 2, 3]


def test_a_run_from_a_checkpoint_of_elsewhere_that_ends_before_it_has_saved_asks_where_to_go_on(
    tmp_path: Path, tiny_model: TinyModel, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    config = small_run(run, tiny_model("llama"), prompts)
    train(config, resume=False)
    (run / "checkpoints" / "step_000004").rename(elsewhere)
    ended_by(ZeroDivisionError(), monkeypatch, "sample 4")
    longer = small_run(run, tiny_model("llama"), prompts, trainer__steps=6)
    with pytest.raises(ZeroDivisionError):
        train(longer, resume=True, checkpoint=elsewhere)
    message = f"left behind, such as {run / 'checkpoints' / 'step_000002'}; choose one with --resume-from"
    with pytest.raises(UserError, match=re.escape(message)):
        train(longer, resume=True)


def test_two_processes_cannot_train_in_one_directory(tmp_path: Path, tiny_model: TinyModel, prompts: Path) -> None:
    config = small_run(tmp_path / "run", tiny_model("llama"), prompts, trainer__steps=1)
    train(config, resume=False)
    with (
        RunDirectory(tmp_path / "run").locked(),
        pytest.raises(UserError, match="another process is training in"),
    ):
        train(config, resume=True)


def test_prompts_that_changed_are_not_resumed_with(tmp_path: Path, tiny_model: TinyModel, prompts: Path) -> None:
    config = small_run(tmp_path / "run", tiny_model("llama"), prompts, trainer__steps=1)
    train(config, resume=False)
    prompts.write_text(prompts.read_text().replace("n7", "m7"))
    with pytest.raises(UserError, match=r"prompts\.source has changed"):
        train(config, resume=True)


def test_a_run_whose_last_event_was_cut_short_resumes_and_reports(
    tmp_path: Path, tiny_model: TinyModel, prompts: Path
) -> None:
    run = tmp_path / "run"
    train(small_run(run, tiny_model("llama"), prompts), resume=False)
    events = run / "events.jsonl"
    events.write_bytes(events.read_bytes()[:-40])
    assert train(small_run(run, tiny_model("llama"), prompts, trainer__steps=5), resume=True) == 0
    assert [event.step for event in steps_of(run)] == [0, 1, 2, 3, 4]


def test_an_unwritable_output_dir_is_a_users_error(tmp_path: Path, prompts: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError) as caught:
        train(small_run(tmp_path / "file" / "run", Path("/nowhere/model"), prompts), resume=False)
    assert str(caught.value) == (
        f"output_dir {tmp_path / 'file' / 'run'} cannot be written: Not a directory; choose another output_dir"
    )


def test_a_metrics_port_that_is_taken_is_a_users_error(tmp_path: Path, prompts: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError) as caught:
            train(
                small_run(tmp_path / "run", Path("/nowhere/model"), prompts, observe__metrics_port=port), resume=False
            )
    assert str(caught.value) == (
        f"observe.metrics_port {port} cannot be had on 127.0.0.1: Address already in use; give another port"
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_engine_and_trainer_agree_on_the_log_probabilities_of_what_was_sampled(
    tmp_path: Path, tiny_model: TinyModel, prompts: Path, family: str
) -> None:
    train(small_run(tmp_path / "run", tiny_model(family), prompts, sampling__temperature=0.7), resume=False)
    mismatches = [event.metrics["rollout_mismatch"] for event in steps_of(tmp_path / "run")]
    assert len(mismatches) == 4
    assert max(mismatches) < 1e-4
