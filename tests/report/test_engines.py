"""The chart and the table of the number of engines."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import plotly.graph_objects as go  # type: ignore[import-untyped]

from tailrace.events import Event
from tailrace.report.charts import Section
from tailrace.report.engines import engine_sections
from tailrace.report.run_data import RunData
from tailrace.report.step_times import step_times
from tests.run.test_elastic_fleet import Run
from tests.transfer.virtual_time import virtual_time

TERMS = {"generation_s": 40.0, "training_s": 25.0, "lead_s": 15.0, "saved_s": 12.5, "lost_s": 30.0}


def started(at: float = 0.0, workers: int = 1) -> Event:
    config = {"cluster": {"rollout": {"workers": workers}}}
    return Event(task="run", actor="driver", start=at, end=at, info={"config": config})


def change(at: float, before: int, after: int, text: str = "", **terms: float) -> Event:
    info: dict[str, Any] = {"text": text or f"{before} → {after} engines, by hand", "by": "hand"}
    info |= {"engines": [f"rollout-{number}" for number in range(after)]}
    metrics = {"engines": float(before), "wanted": float(after), **terms}
    return Event(task="scale", actor="driver", start=at, end=at, metrics=metrics, info=info)


def step_events(step: int, at: float, *, generation_s: float = 4.0, training_s: float = 2.0) -> list[Event]:
    """Two samples that overlap, and a step that is trained on in two parts."""
    end = at + generation_s
    half = training_s / 2
    samples = [(at, end - 1), (at + 1, end)]
    made = [Event(task="sample", actor="engine", start=start, end=end, step=step) for start, end in samples]
    made += [Event(task="actor", actor="trainer", start=end, end=end + half, step=step)]
    made += [Event(task="optimizer", actor="trainer", start=end + half, end=end + training_s, step=step)]
    return [*made, Event(task="step", actor="driver", start=at, end=end + training_s, step=step)]


def run_of(events: Sequence[Event]) -> RunData:
    return RunData(name="run", events=events, last_event_at=datetime.now(UTC))


def drawn(events: Sequence[Event]) -> tuple[Section, dict[str, dict[str, Any]]]:
    (section,) = engine_sections(run_of(events))
    (figure,) = section.figures
    go.Figure(data=figure.data, layout=figure.layout)
    return section, {trace["name"]: trace for trace in figure.data}


def test_a_run_whose_engines_stay_has_no_section() -> None:
    assert engine_sections(run_of([started(), *step_events(0, 0)])) == []


def test_the_number_of_engines_follows_each_change_to_the_end_of_the_run() -> None:
    failed = change(12, 2, 2, "2 engines instead of 3: no place")
    failed.metrics["wanted"] = 3.0
    events = [started(), change(5, 1, 3), change(9, 3, 2), failed]
    _, shown = drawn([*events, *step_events(0, 14)])
    assert list(zip(shown["engines"]["x"], shown["engines"]["y"], strict=True)) == [
        (0, 1),
        (5, 3),
        (9, 2),
        (12, 2),
        (20, 2),
    ]
    assert (shown["more engines"]["x"], shown["fewer engines"]["x"]) == ([5], [9])
    assert shown["not as many as asked for"]["text"] == ["2 engines instead of 3: no place"]


def test_a_change_that_came_short_is_marked_as_such_and_one_that_changes_nothing_not_at_all() -> None:
    short = change(5, 1, 2, "1 → 2 engines instead of 4: 2 were asked for meanwhile")
    short.metrics["wanted"] = 4.0
    section, shown = drawn([started(), short, change(5, 2, 2)])
    assert shown["not as many as asked for"]["y"] == [2]
    assert shown.keys() == {"engines", "not as many as asked for"}
    assert [row["Change"] for row in section.table] == [short.info["text"], "2 → 2 engines, by hand"]


def test_a_resumed_run_begins_with_the_engines_of_its_recipe() -> None:
    _, shown = drawn([started(), change(5, 1, 3), started(8), change(10, 1, 2)])
    assert list(zip(shown["engines"]["x"], shown["engines"]["y"], strict=True))[2] == (8, 1)


def test_the_engines_of_all_pools_count() -> None:
    pools = {"small": {"workers": 2}, "spare": {"workers": 0}}
    info = {"config": {"cluster": {"rollout": {"workers": 1, "pools": pools}}}}
    begun = Event(task="run", actor="driver", start=0, end=0, info=info)
    _, shown = drawn([begun, change(5, 3, 4, "rollout.spare: 0 → 1 engines, by hand")])
    assert shown["engines"]["y"] == [3, 4, 4]


def test_a_run_without_a_configuration_begins_with_the_engines_before_the_first_change() -> None:
    _, shown = drawn([change(5, 2, 3)])
    assert shown["engines"]["y"] == [2, 3, 3]


def test_a_decision_has_its_terms_and_a_change_by_hand_has_none() -> None:
    why = "1 → 2 engines, by elasticity: generation is the longer one"
    section, shown = drawn([started(), change(5, 1, 2, why, **TERMS), change(90, 2, 3)])
    assert section.table == [
        {
            "Change": why,
            "At": "5.0 s",
            "Generation": "40 s",
            "Training": "25 s",
            "δ": "15 s",
            "δ'": "12.5 s",
            "Lost with one less": "30 s",
        },
        {"Change": "2 → 3 engines, by hand", "At": "1 min 30 s"}
        | dict.fromkeys(("Generation", "Training", "δ", "δ'", "Lost with one less"), "–"),
    ]
    decided, by_hand = shown["more engines"]["text"]
    assert decided.startswith(f"{why}<br>Generation 40 s<br>Training 25 s<br>δ 15 s<br>δ' 12.5 s")
    assert by_hand == "2 → 3 engines, by hand"


def test_the_table_has_the_newest_changes_and_says_so() -> None:
    section, shown = drawn([change(at, 1 + at % 2, 2 - at % 2) for at in range(50)])
    assert [row["At"] for row in section.table] == [f"{at} s" for at in range(10, 50)]
    assert list(section.table[0]) == ["Change", "At"], "none of them has terms"
    assert section.note == "The table has the newest 40 of 50 changes."
    assert len(shown["more engines"]["x"]) == len(shown["fewer engines"]["x"]) == 25


def test_times_of_a_step_are_those_in_which_it_was_generated_and_trained_on() -> None:
    events = [*step_events(0, 0), *step_events(1, 10, generation_s=8, training_s=3)]
    assert [(time.generation_s, time.training_s) for time in step_times(run_of(events))] == [(4, 2), (8, 3)]
    _, shown = drawn([started(), *events, change(30, 1, 2)])
    assert shown["generation of a step"]["y"] == [4, 8]
    assert shown["training on it"]["y"] == [2, 3]
    assert shown["training on it"]["x"] == [6, 21]  # the ends of the steps


def test_models_that_are_trained_at_the_same_time_take_no_longer_than_one() -> None:
    critic = Event(task="actor", actor="critic", start=4.5, end=5.5, step=0)
    (time,) = step_times(run_of([*step_events(0, 0), critic]))
    assert time.training_s == 2


def test_time_in_which_two_steps_are_generated_counts_for_the_earlier_one() -> None:
    events = [*step_events(0, 0, generation_s=8), *step_events(1, 5, generation_s=8)]  # until 8, from 5 to 13
    assert [time.generation_s for time in step_times(run_of(events))] == [8, 5]


@virtual_time
async def test_the_decisions_of_a_real_fleet_are_drawn() -> None:
    async with Run([], places=5, max_workers=3).open() as run:
        for step in range(10):
            await run.step(100 if step < 4 else 1500, training_s=20.0)
        section, shown = drawn(run.events)
        assert shown["engines"]["y"] == [1, 2, 3, 3]
        for row, event in zip(section.table, run.changes, strict=True):
            assert row["Change"] == event.info["text"]
            assert all(row[title] != "–" for title in row)
        times = {round(time.generation_s, 6) for time in step_times(run_of(run.events))}
        assert {round(event.metrics["generation_s"], 6) for event in run.changes} <= times
        assert set(shown["training on it"]["y"]) == {20.0}
