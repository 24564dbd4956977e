"""`tailrace trace export` writes the trace of a run, or one line that says why not."""

from pathlib import Path

import msgspec
import pytest

from tailrace.events import Event
from tailrace.workloads.files import read_trace
from tests.conftest import Command


def response(group: int, sample: int, *, step: int | None = 0, tokens: int = 5, end: float = 3.0) -> Event:
    info = {"group": group, "sample": sample, "prompt_tokens": 7, "finish_reason": "stop", "last_version": 1}
    return Event(task="sample", actor="engine", start=1.0, end=end, step=step, tokens=tokens, version=0, info=info)


def graded(group: int, sample: int, reward: float | None, *, end: float = 3.5, **info: bool) -> Event:
    told = {"graded": [[group, sample, reward]], **info}
    return Event(task="reward", actor="reward", start=3.25, end=end, step=0, info=told)


def ended(step: int = 0) -> Event:
    return Event(task="step", actor="driver", start=0.5, end=9.5, step=step)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A directory with the beginning of a run."""
    config = {"model": {"path": "a-model"}, "algorithm": {"type": "grpo"}, "sampling": {"max_new_tokens": 9}}
    begin = Event(task="run", actor="driver", start=0, end=0, info={"config": config, "machine": "x86_64"})
    return events_in(tmp_path / "run", begin)


def events_in(directory: Path, *events: Event) -> Path:
    directory.mkdir(exist_ok=True)
    with (directory / "events.jsonl").open("ab") as file:
        file.writelines(msgspec.json.encode(event) + b"\n" for event in events)
    return directory


def test_the_trace_has_each_sample_with_its_newest_response_and_reward(tailrace_here: Command, run: Path) -> None:
    events_in(
        run,
        response(0, 1),
        response(0, 0),
        response(0, 0, step=None),
        graded(0, 1, 0.5),
        graded(0, 0, 1.0),
        graded(0, 0, 0.25, void=True),
        response(0, 1, tokens=6, end=8.0),
        graded(0, 1, None, end=9.0),
        ended(),
        response(1, 0, step=1),
    )
    done = tailrace_here("trace", "export", str(run))
    assert (done.returncode, done.stdout) == (0, f"{run}/workload.parquet: 2 samples in 1 group and 1 step\n")
    trace = read_trace(run / "workload.parquet")
    columns = ("sample", "response_tokens", "reward", "reward_s", "end", "first_version", "last_version")
    assert trace.samples.select(columns).rows() == [(0, 5, 1.0, 0.25, 3.0, 0, 1), (1, 6, None, 5.75, 8.0, 0, 1)]
    assert trace.provenance.model == "a-model"
    assert trace.provenance.hardware == "x86_64"
    assert trace.provenance.max_new_tokens == 9


def test_work_that_a_resumed_run_has_lost_is_not_in_its_trace(tailrace_here: Command, run: Path) -> None:
    again = Event(task="run", actor="driver", start=4.0, end=4.0, info={"resumed_from": "step_000001"})
    events_in(run, response(0, 0), response(1, 0, step=1, end=5.0), again, response(1, 1, step=1, end=6.0))
    events_in(run, ended(), ended(1))
    assert tailrace_here("trace", "export", str(run), "--output", str(run / "a.jsonl")).returncode == 0
    assert read_trace(run / "a.jsonl").samples.select("group", "sample").rows() == [(0, 0), (1, 1)]


def test_the_events_of_a_run_are_not_replaced_by_its_trace(tailrace_here: Command, run: Path) -> None:
    link, events = run / "events.parquet", run / "events.jsonl"
    link.symlink_to("events.jsonl")
    before = events_in(run, response(0, 0), ended()) and events.read_bytes()
    for output in (link, events):
        done = tailrace_here("trace", "export", str(run), "--output", str(output), "--force")
        assert f"--output {output} is an input of this command; give another file" in done.stderr
    assert events.read_bytes() == before
    assert tailrace_here("trace", "export", str(run)).returncode == 0
    assert tailrace_here("trace", "export", str(run)).returncode == 0


def test_a_run_without_a_trace_says_so_in_one_line(tailrace_here: Command, run: Path, tmp_path: Path) -> None:
    events_in(run, response(0, 0))
    done = tailrace_here("trace", "export", str(run))
    assert (done.returncode, done.stderr) == (
        2,
        "tailrace: run has not ended a step yet; a trace needs the samples of one\n",
    )
    old = events_in(
        tmp_path / "old",
        Event(task="sample", actor="engine", start=1.0, end=2.0, step=0, tokens=5, info={"group": 3}),
    )
    done = tailrace_here("trace", "export", str(old))
    assert "the events are of an earlier Tailrace" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (run / "workload.parquet").exists()
    done = tailrace_here("trace", "export", str(tmp_path))
    assert "is not the directory of a run" in done.stderr
