"""The events of whole runs about themselves: how each worker spent its time, its weights, and the queue.

Workers are in this event loop, so that runs are quick; their events are the same.
"""

import functools
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import polars as pl
import pytest
from safetensors.torch import load_file

from tailrace.events import Event, read_events
from tailrace.registers.events import EventKind
from tailrace.registers.metrics import METRICS
from tailrace.registers.phases import PARTS, PHASES, PURPOSES, Work
from tailrace.report.breakdown import breakdown_of
from tailrace.report.run_data import RunData
from tailrace.report.samples import read_samples
from tailrace.report.timeline import timeline
from tailrace.report.trace import trace_events
from tailrace.report.trace_sink import trace_of_run
from tailrace.report.worker_figures import worker_sections
from tailrace.run.evaluation import of_several_by_prompt
from tailrace.run.step_metrics import failure_metrics, reward_metrics
from tailrace.run.train import train
from tailrace.workloads.files import read_trace
from tests.conftest import TinyModel
from tests.helpers.local_workers import use_local_workers
from tests.helpers.runs import small_run, write_prompts
from tests.run.test_evaluation import graded

PIPELINES: dict[str, dict[str, Any]] = {
    "colocated": {},
    "synchronous": {"placement": "separated"},
    "delayed": {"placement": "separated", "max_staleness": 1, "streaming": True},
}
NOW = datetime(2026, 1, 1, tzinfo=UTC)
SEPARATED = ["synchronous", "delayed"]
Observed = Callable[[str], list[Event]]


@pytest.fixture(scope="module")
def directory_of(tmp_path_factory: pytest.TempPathFactory, tiny_model: TinyModel) -> Callable[[str], Path]:
    """A function from a name in PIPELINES to the directory of its run, which is made once."""

    @functools.cache
    def made(name: str) -> Path:
        return _run(name, tmp_path_factory.mktemp(name), tiny_model("llama"))

    return made


@pytest.fixture(scope="module")
def observed(directory_of: Callable[[str], Path]) -> Observed:
    """A function from a name in PIPELINES to the events of its run."""
    return functools.cache(lambda name: read_events(directory_of(name) / "events.jsonl"))


def _run(name: str, directory: Path, model: Path) -> Path:
    config = small_run(
        directory / "run",
        model,
        write_prompts(directory / "prompts.jsonl"),
        pipeline=PIPELINES[name],
        algorithm__kl={"coefficient": 0.01},
        observe__trace=True,
        **({} if name == "colocated" else {"weights": {"mode": name}}),
    )
    with pytest.MonkeyPatch.context() as patch:
        use_local_workers(patch)
        assert train(config, resume=False) == 0
    return directory / "run"


def activities(events: list[Event]) -> dict[str, list[Event]]:
    """The activity events of each worker, in the order of time."""
    said: dict[str, list[Event]] = {}
    for event in events:
        if event.task == "activity":
            said.setdefault(event.worker, []).append(event)
    return said


@pytest.mark.parametrize("name", SEPARATED)
def test_the_states_of_each_worker_add_up_to_its_time(observed: Observed, name: str) -> None:
    said = activities(observed(name))
    assert said.keys() == {"rollout-0", "reward-0", "reference-0", "trainer"}
    for worker in said.values():
        assert all(sum(event.metrics.values()) == pytest.approx(event.end - event.start) for event in worker)
        assert all(before.end == after.start for before, after in pairwise(worker))
        assert sum(event.metrics["busy"] for event in worker) > 0
        assert sum(event.metrics["data"] for event in worker) > 0


WORK_OF = {
    "engine": {"generation", "weight_transfer"},
    "rollout-0": {"generation", "weight_transfer"},
    "reward": {"reward", "advantage"},
    "reward-0": {"reward", "advantage"},
    "reference": {"reference"},
    "reference-0": {"reference"},
    "trainer": {"update"},
}
"""The work of each worker in training steps; beside it the trainer of a separated run sends weights."""
KNOWN_PARTS = {"generation": {*PARTS["generation"], "other"}, "update": {*PARTS["update"], "other"}}


@pytest.mark.parametrize("name", PIPELINES)
def test_the_shares_of_each_worker_add_up_to_one_in_all_steps_and_in_each(observed: Observed, name: str) -> None:
    run = RunData(name="", events=observed(name), last_event_at=NOW)
    for steps in (run.steps, *([step] for step in run.steps)):
        workers = breakdown_of(run.events, steps)
        assert len(workers) == 4
        for worker in workers:
            assert sum(map(worker.share, PHASES)) == pytest.approx(1)
            assert worker.seconds <= sum(step.end - step.start for step in steps) + 1e-6
            for phase, parts in worker.parts.items():
                assert sum(parts.values()) == pytest.approx(worker.share(phase))


@pytest.mark.parametrize("name", PIPELINES)
def test_each_worker_does_its_own_work_and_its_engine_or_trainer_knows_the_parts(observed: Observed, name: str) -> None:
    run = RunData(name="", events=observed(name), last_event_at=NOW)
    for worker in breakdown_of(run.events, [Event(task="run", actor="driver", start=0.0, end=run.seconds)]):
        sends = {"weight_transfer"} if worker.worker == "trainer" and name != "colocated" else set()
        work = {phase for phase in get_args(Work) if worker.share(phase)} - {"other"}
        assert work == WORK_OF[worker.worker] | sends
        assert worker.parts.keys() == work & KNOWN_PARTS.keys()
        for phase, parts in worker.parts.items():
            assert parts.keys() <= KNOWN_PARTS[phase]
            assert len(parts) >= 5


@pytest.mark.parametrize("name", PIPELINES)
def test_every_step_has_the_shares_of_its_workers_and_their_memory(observed: Observed, name: str) -> None:
    *_, last = (event for event in observed(name) if event.task == "step")
    shares = [value for figure, value in last.metrics.items() if figure.startswith("share/trainer/")]
    assert sum(shares) == pytest.approx(1)
    assert last.metrics["memory/driver" if name == "colocated" else "memory/trainer"] > 2**20


@pytest.mark.parametrize("name", PIPELINES)
def test_the_purposes_of_the_memory_are_all_of_it(observed: Observed, name: str) -> None:
    told = [event for event in observed(name) if event.task == "memory"]
    assert {event.worker or event.actor for event in told} == (
        {"driver"} if name == "colocated" else {"rollout-0", "reward-0", "reference-0", "trainer"}
    )
    for event in told:
        assert sum(event.metrics.get(purpose, 0.0) for purpose in PURPOSES) == event.metrics["peak"]
        assert event.metrics["peak"] == event.metrics["resident"]


@pytest.mark.parametrize(("name", "worker"), [("colocated", ""), ("synchronous", "trainer")])
def test_the_memory_of_a_trainer_is_what_its_model_takes(
    observed: Observed, directory_of: Callable[[str], Path], name: str, worker: str
) -> None:
    trained = load_file(directory_of(name) / "model" / "model.safetensors")
    parameters = sum(tensor.numel() for tensor in trained.values())
    told = [event.metrics for event in observed(name) if event.task == "memory" and event.worker == worker]
    assert max(metrics["gradients"] for metrics in told) == 4 * parameters
    moments = max(metrics["optimizer"] for metrics in told)
    assert moments == 2 * 4 * parameters + 4 * len(trained), "two moments, and the number of steps of each tensor"


@pytest.mark.parametrize(("name", "waiting"), [("synchronous", {"rollout-0", "trainer"}), ("delayed", {"rollout-0"})])
def test_who_waits_for_weights_says_so_and_nobody_else(observed: Observed, name: str, waiting: set[str]) -> None:
    said = activities(observed(name))
    assert {worker for worker in said if sum(event.metrics["weights"] for event in said[worker]) > 0} == waiting


def test_a_drain_stands_in_the_timeline_before_the_weights_that_it_makes_way_for(observed: Observed) -> None:
    engine = [event for event in observed("delayed") if event.actor == "engine"]
    drains = [event for event in engine if event.task == "weights_drain"]
    installs = [event for event in engine if event.task == "update_weights"]
    assert installs
    assert all(drain.end <= install.start for drain, install in zip(drains, installs, strict=True))
    tracks = timeline(RunData(name="run", events=observed("delayed"), last_event_at=NOW))
    assert tracks is not None
    assert [len(track["start"]) for track in tracks["tracks"] if track["task"] == "weights_drain"] == [len(drains)]


SPANS = {"rollout", "sample", "actor", "optimizer", "update_weights", "evaluation", "checkpoint", "export", "step"}
"""The kinds of spans of every run that have a weight version. Rewards and advantages have none."""


@pytest.mark.parametrize(
    ("name", "spans"),
    [
        ("colocated", SPANS),
        ("synchronous", SPANS | {"weights_publish", "weights_transfer", "weights_wait"}),
        ("delayed", SPANS | {"weights_publish", "weights_transfer", "weights_drain"}),
    ],
)
def test_every_span_of_work_with_weights_has_their_version(observed: Observed, name: str, spans: set[str]) -> None:
    work = [event for event in observed(name) if event.about.is_work]
    versioned = {event.task for event in work if event.version is not None}
    assert versioned - {"evaluation_wait"} == spans | {"reference"}  # which comes where an evaluation takes longer
    assert {event.task for event in work if event.version is None} <= {"reward", "advantage", "worker_started"}
    of_steps = [event for event in work if event.task in ("actor", "optimizer", "step", "checkpoint")]
    assert all(event.version == event.step for event in of_steps)
    assert [event.version for event in work if event.task == "export"] == [4]


@pytest.mark.parametrize(("name", "rows"), [("colocated", {"engine"}), ("delayed", {"rollout-0 · engine", "trainer"})])
def test_the_trace_of_a_run_counts_the_version_of_each_worker(observed: Observed, name: str, rows: set[str]) -> None:
    traced = trace_events(observed(name))
    names = {event["pid"]: event["args"]["name"] for event in traced if event["name"] == "process_name"}
    newest = {names[event["pid"]]: event["args"]["value"] for event in traced if event["name"] == "weight version"}
    assert newest.keys() == rows
    assert newest.get("trainer", 4) == 4


@pytest.mark.parametrize("name", PIPELINES)
def test_every_run_shows_its_queue_from_the_beginning_to_the_end(observed: Observed, name: str) -> None:
    events = observed(name)
    first, *_, last = (event for event in events if event.task == "queue")
    tasks = ["rollout", "reward", "reference", "advantage", "actor"]
    assert {f"{count}/{task}" for count in ("ready", "expired") for task in tasks} <= first.metrics.keys()
    assert first.end < min(event.end for event in events if event.task == "step")
    assert last.metrics["rows"] == 0
    titles = [section.title for section in worker_sections(RunData(name="", events=events, last_event_at=NOW))]
    assert "Queue" in titles


@pytest.mark.parametrize("name", SEPARATED)
def test_every_mode_keeps_the_texts_of_the_same_prompts(directory_of: Callable[[str], Path], name: str) -> None:
    ours, theirs = (
        sorted((one.kind, one.step, one.group, one.sample, one.prompt, one.answer) for one in read_samples(path))
        for path in (directory_of(mode) / "samples.jsonl" for mode in (name, "colocated"))
    )
    assert ours == theirs
    assert [one[0] for one in ours].count("training") == 4 * 2 * 4


@pytest.mark.parametrize("name", PIPELINES)
def test_the_trace_of_a_run_equals_what_its_events_tell_sample_by_sample(
    directory_of: Callable[[str], Path], observed: Observed, name: str
) -> None:
    exported = trace_of_run(directory_of(name))
    told = {
        (event.info["group"], event.info["sample"]): (event.step, event.tokens, event.start, event.end)
        for event in observed(name)
        if event.task == "sample" and event.step is not None
    }
    columns = ("group", "sample", "step", "response_tokens", "start", "end")
    rows = {row[:2]: row[2:] for row in exported.samples.select(columns).iter_rows()}
    assert rows == told
    assert len(rows) == 4 * 2 * 4
    steps = {event.step: event.metrics for event in observed(name) if event.task == "step"}
    means = exported.samples.group_by("step").agg(pl.col("reward", "response_tokens").mean())
    for step, reward, tokens in means.iter_rows():
        assert steps[step]["reward"] == pytest.approx(reward)
        assert steps[step]["response_tokens_mean"] == pytest.approx(tokens)
    assert exported.samples["prompt_tokens"].min() > 0  # type: ignore[operator]
    assert exported.samples["reward_s"].min() >= 0  # type: ignore[operator]


@pytest.mark.parametrize("name", PIPELINES)
def test_a_trace_written_while_the_run_goes_on_equals_the_exported_one(
    directory_of: Callable[[str], Path], name: str
) -> None:
    written, exported = read_trace(directory_of(name) / "workload.jsonl"), trace_of_run(directory_of(name))
    assert written.samples.equals(exported.samples)
    assert written.provenance == exported.provenance


@pytest.mark.parametrize("name", PIPELINES)
def test_every_event_of_a_run_is_of_a_kind_in_the_register(observed: Observed, name: str) -> None:
    assert {event.task for event in observed(name)} <= {str(kind) for kind in EventKind}


def pattern(name: str) -> str:
    """The name of a metric on the page: `time/rollout` becomes `time/<task>`."""
    if name.startswith(("pass@", "maj@")):
        return name.partition("@")[0] + "@<k>"
    before, slash, _ = name.partition("/")
    if not slash or before in PARTS:
        return name
    kinds = {"time": "task", "staleness": "versions", "reward": "part", "reward_failures": "kind"}
    kinds |= {"share": "worker>/<phase", "memory": "worker"}
    return f"{before}/<{kinds.get(before, 'task')}>"


def emitted(events: list[Event]) -> dict[str, set[str]]:
    by_task: dict[str, set[str]] = {}
    for event in events:
        by_task.setdefault(event.task, set()).update(map(pattern, event.metrics))
    return {task: names for task, names in by_task.items() if names}


def test_the_register_of_metrics_has_all_that_runs_tell_and_nothing_else(observed: Observed) -> None:
    told = emitted([*observed("colocated"), *observed("delayed")])
    of_grader = {*reward_metrics([1.0], [{"format": 1.0, "correct": 1.0}]), *failure_metrics(["timeout: 1 s"])}
    for task in ("step", "evaluation"):
        told[task] |= set(map(pattern, of_grader))
    told["evaluation"] |= set(map(pattern, of_several_by_prompt(graded(0, True, False, final_answers="75"))))
    registered: dict[str, set[str]] = {}
    for entry in METRICS:
        for kind in entry.of:
            registered.setdefault(kind, set()).add(entry.name)
    told["step"] |= {"ratio_overflow", "rollout_overflow"}  # of ratios that would overflow
    told["step"] |= {"correction_masked", "rejected_tokens", "rejected_samples", "remade_groups"}  # of other recipes
    told["step"].add("kl_coefficient")  # of an adaptive penalty
    told["step"] |= {"critic/explained_variance", "critic/value_loss", "critic/<figure>"}
    for task in ("step", "evaluation", "reward"):
        told.setdefault(task, set()).add("spent/<what>")  # of a judge
    told["memory"].add("activations")  # of a GPU
    told["breakdown"] |= {"generation/communication", "update/communication", "tools"}  # of several ranks, of replays
    elsewhere = {"warning", "adaptive_tp", "dispatch", "dispatch_change", "scale"}  # these have tests of their own
    assert {task: names for task, names in registered.items() if task not in elsewhere} == told
