"""The charts of the checks of dispatch."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import plotly.graph_objects as go  # type: ignore[import-untyped]
import pytest

from tailrace.events import Event
from tailrace.report.charts import Figure, Section
from tailrace.report.dispatch import dispatch_sections
from tailrace.report.run_data import RunData
from tests.report.synthetic import CONFIG
from tests.rollout.test_foresight import EVEN, SKEWED, engines, make_foresight, play
from tests.transfer.virtual_time import virtual_time

GIVEN_UP = "prompts are pulled from now on: placing them is predicted to gain 0.5 % over that"


def started() -> Event:
    config = CONFIG | {"rollout": {"dispatch": {"least_gain": 0.02}}}
    return Event(task="run", actor="driver", start=0, end=0, info={"config": config, "total_steps": 12})


def check(step: int, *, gain: float | None = 0.05, placed: bool = True, **more: float) -> Event:
    metrics = {"expected_inside": 0.75, "expected_tau": 0.4, "placed": float(placed), **more}
    metrics |= {"recall_20": 0.5, "recall_10": 0.4, "recall_5": 0.25, "recall_ceiling_20": 0.6}
    if gain is not None:
        metrics |= {"pull_s": 20.0, "ordered_s": 18.0, "placed_s": 18 * (1 - gain)}
        metrics |= {"order_gain": 0.1, "placement_gain": gain}
    info = {"lengths": "siblings", "policy": "skewness_aware"}
    return Event(task="dispatch", actor="rollout", start=step, end=step, step=step, metrics=metrics, info=info)


def change(step: int | None, text: str = GIVEN_UP, *, placed: bool = False, at: float = 0) -> Event:
    end, metrics = float(at if step is None else step), {"placed": float(placed)}
    info = {"text": text}
    return Event(task="dispatch_change", actor="rollout", start=end, end=end, step=step, metrics=metrics, info=info)


def section_of(events: Sequence[Event]) -> Section:
    (section,) = dispatch_sections(RunData(name="run", events=events, last_event_at=datetime.now(UTC)))
    for figure in section.figures:
        go.Figure(data=figure.data, layout=figure.layout)
        assert figure.data
    return section


def traces(figure: Figure) -> dict[str, dict[str, Any]]:
    return {trace["name"]: trace for trace in figure.data}


def test_a_run_without_checks_has_no_section() -> None:
    assert dispatch_sections(RunData(name="run", events=[started()], last_event_at=datetime.now(UTC))) == []


@pytest.mark.parametrize(("number", "percent"), [(0, 20), (1, 10), (2, 5)])
def test_recall_stands_beside_that_by_other_samples_and_chance(number: int, percent: int) -> None:
    figure = section_of([started(), check(3), check(7)]).figures[number]
    shown = traces(figure)
    assert figure.id == f"recall-{percent}"
    assert shown["found"]["x"] == [4, 8]  # steps count from 1, as on the console
    assert shown["found"]["y"] == [check(3).metrics[f"recall_{percent}"]] * 2
    assert shown["chance"]["y"] == [percent / 100] * 2
    assert ("other samples" in shown) == (percent == 20)  # where the events have one


def test_a_line_breaks_where_a_check_has_no_figure() -> None:
    equal = check(7)
    del equal.metrics["expected_tau"]
    shown = traces(section_of([started(), check(3), equal, check(11)]).figures[3])
    assert shown["Kendall's τ"]["x"] == [4, 8, 12]
    assert shown["Kendall's τ"]["y"] == [0.4, None, 0.4]


def test_the_note_says_how_sure_a_recall_is() -> None:
    few = check(3)
    few.samples = 64
    note = section_of([started(), few]).note
    assert "A check of 64 responses has 13 in the longest fifth, so that recall is sure to about ±11 points" in note
    assert "Other samples: the recall by the mean length of each group's other samples, which is no bound." in note


def test_gains_stand_beside_the_least_gain_and_each_change_is_marked() -> None:
    back = change(11, "prompts are placed again", placed=True)
    events = [started(), check(3), check(7, gain=0.005), change(7), check(11, gain=0.04, placed=False), back]
    section = section_of(events)
    *others, gains = section.figures
    shown = traces(gains)
    assert shown["placement, over both"]["y"] == [0.05, 0.005, 0.04]
    assert shown["order, over pulling as they came"]["y"] == [0.1] * 3
    assert shown["least gain of placement"]["y"] == [0.02] * 2
    assert (shown["pulled from then on"]["x"], shown["pulled from then on"]["y"]) == ([8], [0.005])
    assert (shown["placed from then on"]["x"], shown["placed from then on"]["y"]) == ([12], [0.04])
    assert shown["pulled from then on"]["text"][0].replace("<br>", " ") == GIVEN_UP
    for figure in section.figures:
        assert [line["x0"] for line in figure.layout["shapes"]] == [8, 12]
    assert [figure.id for figure in others] == ["recall-20", "recall-10", "recall-5", "expected-lengths"]
    assert section.note.endswith("the newest, after step 12: prompts are placed again.")


def test_a_change_that_no_check_led_to_comes_after_the_steps_that_had_ended() -> None:
    steps = [Event(task="step", actor="driver", start=n, end=n + 1, step=n) for n in range(4)]
    failed = change(None, "the lengths cannot be had", at=2.5)
    section = section_of([started(), *steps, failed])
    assert section.figures == []
    assert section.note == "A vertical line is a change; the newest, after step 2: the lengths cannot be had."
    marks = traces(section_of([started(), *steps, failed, check(3)]).figures[-1])["pulled from then on"]
    assert (marks["x"], marks["y"]) == ([2], [0.0])


def test_where_engines_do_not_tell_their_steps_there_are_no_gains() -> None:
    assert [figure.id for figure in section_of([check(3, gain=None)]).figures] == [
        "recall-20",
        "recall-10",
        "recall-5",
        "expected-lengths",
    ]


def test_a_policy_that_knows_no_lengths_has_the_gain_of_the_order_alone() -> None:
    pulled = check(3, placed=False)
    del pulled.metrics["placement_gain"], pulled.metrics["placed_s"]
    (order,) = section_of([started(), pulled]).figures[-1].data
    assert (order["y"], order["customdata"]) == ([0.1], ["pulled 20 s, in order 18 s"])


def test_without_a_recorded_configuration_the_least_gain_is_left_out() -> None:
    assert "least gain of placement" not in traces(section_of([check(3)]).figures[-1])


@virtual_time
async def test_the_checks_of_a_real_service_are_drawn() -> None:
    events: list[Event] = [started()]
    foresight = make_foresight(events, per_step=32)
    for step, lengths in enumerate([SKEWED, EVEN, EVEN, SKEWED]):
        await play(foresight, step, lengths, engines(2, slots=64), lengths)
    section = section_of(events)
    shown = traces(section.figures[-1])
    assert shown["pulled from then on"]["x"] == [2]
    assert shown["placed from then on"]["x"] == [4]
    assert section.note.startswith("Policy skewness_aware, lengths from oracle; 4 checks.")


def test_moves_are_counted_by_their_way() -> None:
    moves = [
        Event(task="move", actor="rollout", start=1, end=1, samples=1, info={"source": "a", "target": "b", "way": way})
        for way in ("transfer", "recompute", "transfer")
    ]
    section = section_of([started(), *moves, check(3)])
    assert section.note.endswith("3 moves of running responses: 2 by their keys and values, 1 computed again.")
    assert section.table[1] == {"Move of a response at": "1.0 s", "From": "a", "To": "b", "By": "computed again"}
    assert len(section.table) == 3


def test_the_table_has_the_newest_moves_and_says_so() -> None:
    moves = [
        Event(task="move", actor="rollout", start=at, end=at, info={"source": "a", "target": "b", "way": "transfer"})
        for at in range(50)
    ]
    section = section_of([started(), *moves, check(3)])
    assert [row["Move of a response at"] for row in section.table] == [f"{at} s" for at in range(30, 50)]
    assert section.note.endswith("The table has the newest 20.")
