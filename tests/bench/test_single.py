"""A benchmark plays its workload with Tailrace, or with the adapter of another framework."""

import json
import os
import select
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from tailrace.bench.figures import figures_of
from tailrace.bench.setup import make_setup
from tailrace.bench.single import check_single, run_single
from tailrace.config.run import RunConfig
from tailrace.errors import BenchError, UserError
from tailrace.events import read_events
from tailrace.run.train import train
from tests.helpers.bench import ADAPTER, SEPARATED
from tests.helpers.traces import write_lengths


def test_a_benchmark_leaves_its_figures_and_no_weights(tmp_path: Path, recipe: Path) -> None:
    setup = make_setup(write_lengths(tmp_path / "a.parquet"), recipe, ["sampling.max_new_tokens=12"])
    result = run_single(setup, warm_up=1)
    [step] = result.figures.steps
    assert (result.samples, result.cut, step.samples) == (12, 3, 6)
    assert step.response_tokens == 9 + 3 + 11 + 12 + 12 + 12
    process, *workers = result.figures.workers
    assert (process.worker, process.shares, (process.peak_memory_gib or 0) > 0) == ("driver", {}, True)
    assert [sum(worker.shares.values()) for worker in workers] == pytest.approx([1] * len(workers))
    run = tmp_path / "run"
    assert json.loads((run / "bench.json").read_text())["figures"]["step_s"] == result.figures.step_s
    assert {path.name for path in run.iterdir()} >= {"events.jsonl", "report.html", "given"}
    assert not (run / "model").exists()
    assert not (run / "checkpoints").exists()
    assert all(event.task != "checkpoint" for event in read_events(run / "events.jsonl")), "none is written at all"
    with pytest.raises(UserError, match="holds a run already"):
        run_single(setup, warm_up=1)


def test_an_attempt_that_a_death_has_ended_does_not_count(
    tmp_path: Path, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_lost_attempt(config: RunConfig, **given: Any) -> int:
        code = train(config, **given)
        lost = [replace(event, end=10 * event.end) for event in read_events(events)[:-1]]
        whole = events.read_bytes()
        events.write_bytes(b"".join(msgspec.json.encode(event) + b"\n" for event in lost) + whole)
        (tmp_path / "whole.jsonl").write_bytes(whole)
        return code

    events = tmp_path / "run" / "events.jsonl"
    monkeypatch.setattr("tailrace.bench.single.train", with_lost_attempt)
    setup = make_setup(write_lengths(tmp_path / "a.parquet"), recipe, ["sampling.max_new_tokens=12"])
    result = run_single(setup, warm_up=0)
    assert result.figures == figures_of(read_events(tmp_path / "whole.jsonl"), warm_up=0, devices=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"warm_up": 2}, r"the run has 2 steps, and 2 of them warm up; raise trainer\.steps"),
        ({"warm_up": 1, "adapter": "it's"}, '--adapter was given "it\'s": No closing quotation'),
        ({"warm_up": 1, "adapter": ""}, "--adapter is empty; give a command"),
        ({"warm_up": 1, "adapter": "no-such-program"}, "--adapter begins with 'no-such-program', which is no program"),
    ],
)
def test_options_that_cannot_work_are_found_before_the_run(
    tmp_path: Path, recipe: Path, options: dict[str, Any], message: str
) -> None:
    setup = make_setup(write_lengths(tmp_path / "a.parquet"), recipe, [])
    for begin in (check_single, run_single):
        with pytest.raises(UserError, match=message):
            begin(setup, **options)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["engine={type: native, kv_cache_gib: 0.00001}"], r"engine\.kv_cache_gib 1e-05 holds"),
        (["trainer.backend={type: adapter, path: no_such.trainer}"], "no_such"),
        (["device=cuda:99"], "device 'cuda:99' cannot be used here"),
        ([*SEPARATED, "cluster.rollout.cpus=9999"], r"cluster\.rollout asks for 9999 CPU"),
    ],
)
def test_a_recipe_that_cannot_run_is_found_before_the_run(
    tmp_path: Path, recipe: Path, changes: list[str], message: str
) -> None:
    setup = make_setup(write_lengths(tmp_path / "a.parquet"), recipe, changes)
    with pytest.raises(UserError, match=message):
        check_single(setup, warm_up=1)
    assert not (tmp_path / "run").exists()


def test_nothing_is_left_of_a_check(tmp_path: Path, recipe: Path) -> None:
    setup = make_setup(write_lengths(tmp_path / "a.parquet"), recipe, [])
    before = set(tmp_path.rglob("*"))
    check_single(setup, warm_up=1)
    check_single(setup, warm_up=1, adapter=ADAPTER)
    assert set(tmp_path.rglob("*")) == before


def test_an_adapter_plays_the_same_jobs(tmp_path: Path, recipe: Path) -> None:
    setup = make_setup(write_lengths(tmp_path / "a.parquet"), recipe, ["sampling.max_new_tokens=50"])
    result = run_single(setup, warm_up=0, adapter=ADAPTER)
    assert [step.seconds for step in result.figures.steps] == [30, 14]
    assert result.figures.training_tokens_per_s is None
    assert (
        "Not shown: the events are of an earlier Tailrace, or of an adapter"
        in (tmp_path / "run" / "report.html").read_text()
    )
    header, first, *_ = map(json.loads, (tmp_path / "run" / "jobs.jsonl").read_text().splitlines())
    assert (header["steps"], header["groups_per_step"], header["group_size"]) == (2, 3, 2)
    assert len(first["prompt_ids"]) == 20
    assert [job["turns"][0]["generated_tokens"] for job in first["samples"]] == [30, 4]


def test_the_jobs_say_what_work_a_step_is(tmp_path: Path, recipe: Path) -> None:
    changes = ["algorithm.kl.coefficient=0.1", "trainer.mini_batch_size=2", "trainer.gradient_checkpointing=true"]
    graders = [
        "rewards.workers=3",
        "rewards.grader={type: function, path: tests.rewards.async_graders.score, concurrency: 5}",
    ]
    setup = make_setup(
        write_lengths(tmp_path / "a.parquet"), recipe, ["sampling.max_new_tokens=50", *changes, *graders]
    )
    run_single(setup, warm_up=0, adapter=ADAPTER)
    header = json.loads((tmp_path / "run" / "jobs.jsonl").read_text().splitlines()[0])
    asked = {"device": "cpu", "devices": 1, "algorithm": "grpo", "kl_coefficient": 0.1, "mini_batch_size": 2}
    asked |= {"gradient_checkpointing": True, "graders": 15}
    assert asked.items() <= header.items()


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        (f"{ADAPTER} shorter=1", "the response of group 0, sample 0, has 29 tokens; 30 were asked for"),
        (
            f"{ADAPTER} first=1",
            "the response of group 0, sample 0, was made in step 1; the jobs have it in step 0",
        ),
        (f"{ADAPTER} further=1", "a step event has step 2; the benchmark's are 0 to 1"),
        ("false", "the adapter 'false' ended with exit code 1"),
        ("true", "the adapter 'true' left no .*events.jsonl"),
    ],
)
def test_an_adapter_that_does_not_play_its_jobs_is_an_error(
    tmp_path: Path,
    recipe: Path,
    adapter: str,
    message: str,
) -> None:
    setup = make_setup(write_lengths(tmp_path / "a.parquet"), recipe, ["sampling.max_new_tokens=50"])
    with pytest.raises(BenchError, match=message):
        run_single(setup, warm_up=0, adapter=adapter)


def test_an_adapter_keeps_freed_memory_as_tailrace_does(tmp_path: Path, recipe: Path) -> None:
    setup = make_setup(write_lengths(tmp_path / "a.parquet"), recipe, ["sampling.max_new_tokens=50"])
    script = tmp_path / "keeps.sh"
    script.write_text(
        f'test "$MALLOC_MMAP_MAX_ $MALLOC_TRIM_THRESHOLD_ $MALLOC_ARENA_MAX" = "0 -1 1" && {ADAPTER} "$1"'
    )
    assert run_single(setup, warm_up=0, adapter=f"sh {script}").samples == 12


def test_nothing_that_an_adapter_has_started_outlives_its_time(tmp_path: Path, recipe: Path) -> None:
    setup = make_setup(write_lengths(tmp_path / "a.parquet"), recipe, ["sampling.max_new_tokens=50"])
    script = tmp_path / "hangs.sh"
    held = tmp_path / "held"
    os.mkfifo(held)
    reader = os.open(held, os.O_RDONLY | os.O_NONBLOCK)
    script.write_text(f"sleep 300 > {held} & wait")
    with pytest.raises(BenchError, match="has not ended within 1 s"):
        run_single(setup, warm_up=0, adapter=f"sh {script}", adapter_timeout_s=1)
    [ended], _, _ = select.select([reader], [], [], 10)  # the end of file comes with the end of the last writer
    assert os.read(ended, 1) == b""
    os.close(reader)
