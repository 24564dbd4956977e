from datetime import UTC, datetime
from itertools import pairwise

from tailrace.events import Event
from tailrace.report.run_data import RunData
from tailrace.report.timeline import MAX_SPANS, STEPS_SHOWN, make_windows, thin_out, timeline
from tests.report.synthetic import SyntheticRun


def run_of(events: list[Event]) -> RunData:
    return RunData(name="run", events=events, last_event_at=datetime(2026, 1, 1, tzinfo=UTC))


def test_windows_follow_each_other_without_overlap() -> None:
    windows = make_windows(run_of(list(SyntheticRun().attempt(0, 60))))
    assert len(windows) == 1 + 60 // STEPS_SHOWN
    assert all(before.end <= after.start + 1e-9 for before, after in pairwise(windows))


def test_a_window_holds_the_evaluation_and_the_export_that_follow_its_steps() -> None:
    events = list(SyntheticRun().attempt(0, 60))
    last = make_windows(run_of(events))[-1]
    assert last.end == max(event.end for event in events)


def test_a_long_run_is_thinned_out_to_a_bounded_number_of_spans() -> None:
    windows = make_windows(run_of(list(SyntheticRun(samples=1).attempt(0, 60))))
    assert thin_out(windows, MAX_SPANS) == windows
    assert thin_out(windows, 5 * MAX_SPANS) == windows[::5]


def test_bars_of_one_row_do_not_cover_each_other() -> None:
    drawn = timeline(run_of(list(SyntheticRun(total_steps=6, samples=16).attempt(0, 6))))
    assert drawn is not None
    bars = [
        (start, start + seconds, y - height / 2, y + height / 2)
        for track in drawn["tracks"]
        for start, seconds, y, height in zip(track["start"], track["seconds"], track["y"], track["height"], strict=True)
    ]
    slack = 2e-3  # times and places are rounded
    for index, one in enumerate(bars):
        for other in bars[index + 1 :]:
            apart_in_time = one[1] <= other[0] + slack or other[1] <= one[0] + slack
            apart_in_place = one[3] <= other[2] + slack or other[3] <= one[2] + slack
            assert apart_in_time or apart_in_place


def test_the_first_window_shown_is_neither_the_shortest_nor_the_longest() -> None:
    drawn = timeline(run_of(list(SyntheticRun().attempt(0, 60))))
    assert drawn is not None
    lengths = [window["end"] - window["start"] for window in drawn["windows"]]
    assert min(lengths) < lengths[drawn["selected"]] < max(lengths)
