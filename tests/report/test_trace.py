import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tailrace.errors import UserError
from tailrace.events import Event
from tailrace.report.trace import trace_events, write_trace
from tests.report.synthetic import SyntheticRun, resumed_run, write_run
from tests.report.synthetic_workers import DIED, separated_run


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    path = write_trace(write_run(tmp_path_factory.mktemp("run"), resumed_run()))
    assert path.name == "trace.json"
    events: list[dict[str, Any]] = json.loads(path.read_bytes())["traceEvents"]
    return events


def complete(traced: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in traced if event["ph"] == "X"]


def test_every_span_is_complete_and_in_whole_microseconds(traced: list[dict[str, Any]]) -> None:
    for event in complete(traced):
        assert all(isinstance(event[key], int) for key in ("pid", "tid", "ts", "dur"))
        assert event["dur"] >= 0


def test_no_two_spans_of_a_thread_overlap(traced: list[dict[str, Any]]) -> None:
    threads = defaultdict(list)
    for event in complete(traced):
        threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert len(threads) > 32
    for spans in threads.values():
        assert all(before[1] <= after[0] for before, after in pairwise(sorted(spans)))


def test_every_actor_and_every_thread_has_a_name(traced: list[dict[str, Any]]) -> None:
    named = {(event["pid"], event["tid"]) for event in traced if event["name"] == "thread_name"}
    assert {(event["pid"], event["tid"]) for event in complete(traced)} == named
    actors = {event["args"]["name"] for event in traced if event["name"] == "process_name"}
    assert actors == {"driver", "engine", "rollout", "reward", "trainer"}


def test_each_response_of_the_run_is_there_once_with_its_tokens(traced: list[dict[str, Any]]) -> None:
    samples = [event for event in complete(traced) if event["cat"] == "sample"]
    assert len(samples) == 60 * 32
    assert all({"step", "version", "tokens", "group", "finish_reason"} <= event["args"].keys() for event in samples)


def test_counters_follow_the_responses_that_run() -> None:
    def sample(start: float, end: float, tokens: int) -> Event:
        return Event(task="sample", actor="engine", start=start, end=end, tokens=tokens)

    counters = [event for event in trace_events([sample(0, 2, 20), sample(1, 3, 40)]) if event["ph"] == "C"]
    running = [(event["ts"], event["args"]["value"]) for event in counters if event["name"] == "running responses"]
    rates = [event["args"]["value"] for event in counters if event["name"] == "tokens per second"]
    assert running == [(0, 1), (1_000_000, 2), (2_000_000, 1), (3_000_000, 0)]
    assert rates == [10, 30, 20, 0]


def test_a_resume_is_marked(traced: list[dict[str, Any]]) -> None:
    marks = [event["name"] for event in traced if event["ph"] == "i"]
    assert marks == ["start", "resumed from checkpoints/20"]


@pytest.mark.parametrize("task", ["scale", "dispatch_change"])
def test_a_change_of_engines_or_of_dispatch_is_marked_with_its_text(task: str) -> None:
    change = Event(task=task, actor="driver", start=3, end=3, info={"text": "1 → 2 engines, by hand"})
    (mark,) = (event for event in trace_events([change]) if event["ph"] == "i")
    assert (mark["name"], mark["ts"], mark["s"]) == ("1 → 2 engines, by hand", 3_000_000, "g")


def test_rounding_never_makes_two_spans_overlap() -> None:
    edge = 1.0000004999
    events = [
        Event(task="actor", actor="trainer", start=0.5, end=edge),
        Event(task="actor", actor="trainer", start=edge, end=edge + 1e-7),
        Event(task="actor", actor="trainer", start=edge + 1e-7, end=2.0),
    ]
    assert {event["tid"] for event in trace_events(events) if event["ph"] == "X"} == {1}


def test_a_run_without_a_finished_step_can_be_traced(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, list(SyntheticRun().attempt(0, 1))[:1])
    assert not complete(json.loads(write_trace(run_dir).read_bytes())["traceEvents"])


def test_a_directory_that_is_no_run_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not the directory of a run"):
        write_trace(tmp_path)
    assert not (tmp_path / "trace.json").exists()


@pytest.fixture(scope="module")
def separated() -> list[dict[str, Any]]:
    return trace_events(separated_run())


def processes(traced: list[dict[str, Any]]) -> dict[int, str]:
    return {event["pid"]: event["args"]["name"] for event in traced if event["name"] == "process_name"}


def test_workers_are_processes_in_the_order_of_the_work(separated: list[dict[str, Any]]) -> None:
    names = processes(separated)
    rollouts = [f"rollout-{number}{row}" for number in range(2) for row in ("", " · engine", " · weights")]
    assert [names[pid] for pid in sorted(names)] == ["driver", *rollouts, "reward-0", "trainer"]


def test_a_death_is_marked_on_its_worker(separated: list[dict[str, Any]]) -> None:
    (mark,) = (event for event in separated if event["ph"] == "i" and event["ts"])
    assert processes(separated)[mark["pid"]] == "rollout-1"
    assert (mark["name"], mark["ts"]) == ("rollout-1 died: killed by signal 9", round(DIED * 1e6))


def test_activity_and_queue_are_counters_and_no_spans(separated: list[dict[str, Any]]) -> None:
    assert {event["cat"] for event in complete(separated)}.isdisjoint({"activity", "queue"})
    counters = {(processes(separated)[event["pid"]], event["name"]) for event in separated if event["ph"] == "C"}
    assert {("trainer", "busy (%)"), ("driver", "queue: ready/actor"), ("driver", "queue: rows")} <= counters
    busy = [event["args"]["value"] for event in separated if event["name"] == "busy (%)"]
    assert busy
    assert all(0 <= value <= 100 for value in busy)


def test_the_way_of_weights_shows_its_version(separated: list[dict[str, Any]]) -> None:
    flights = [event for event in complete(separated) if event["cat"] == "weights_in_flight"]
    assert {processes(separated)[event["pid"]] for event in flights} == {"rollout-0 · weights", "rollout-1 · weights"}
    assert {event["args"]["version"] for event in flights} == set(range(1, 13))


def test_the_weights_of_each_worker_are_a_counter(separated: list[dict[str, Any]]) -> None:
    names = processes(separated)
    counts = [event for event in separated if event["name"] == "weight version"]
    for row in ("rollout-0 · engine", "trainer"):
        assert [event["args"]["value"] for event in counts if names[event["pid"]] == row] == list(range(1, 13))
    assert {names[event["pid"]] for event in counts} == {"rollout-0 · engine", "rollout-1 · engine", "trainer"}
