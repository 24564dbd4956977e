from datetime import UTC, datetime
from itertools import pairwise

from tailrace.events import Event
from tailrace.report.run_data import RunData
from tailrace.report.timeline import MAX_SPANS, STEPS_SHOWN, make_windows, thin_out, timeline
from tests.report.synthetic import SyntheticRun
from tests.report.synthetic_workers import DIED, STARTED, separated_run


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


def test_the_first_window_shown_has_steps_where_the_start_took_as_long() -> None:
    before = Event(task="worker_started", actor="rollout-0", start=0, end=5)
    steps = [Event(task="step", actor="driver", start=5 + 3 * n, end=8 + 3 * n, step=n) for n in range(4)]
    drawn = timeline(run_of([before, *steps]))
    assert drawn is not None
    assert drawn["windows"][drawn["selected"]]["label"] == "step 4"
    alone = timeline(run_of([before]))
    assert alone is not None
    assert alone["selected"] == 0


def test_each_worker_has_its_rows_in_the_order_of_the_work() -> None:
    drawn = timeline(run_of(separated_run()))
    assert drawn is not None
    of_engine = ["", " · engine", " · engine: responses", " · weights"]
    expected = [f"{worker}{row}" for worker in ("rollout-0", "rollout-1") for row in of_engine]
    assert [row["name"] for row in drawn["rows"]] == ["driver", *expected, "reward-0", "trainer"]


def test_what_workers_and_queue_say_of_themselves_is_not_in_the_timeline() -> None:
    drawn = timeline(run_of(separated_run()))
    assert drawn is not None
    assert {track["task"] for track in drawn["tracks"]}.isdisjoint({"activity", "queue", "run", "worker_died"})
    events = [*separated_run(), Event(task="queue", actor="driver", start=9000.0, end=9000.0)]
    assert make_windows(run_of(events)) == make_windows(run_of(separated_run()))


def test_a_death_is_marked_on_the_row_of_its_worker_where_its_new_start_is_a_bar() -> None:
    drawn = timeline(run_of(separated_run()))
    assert drawn is not None
    row = next(row for row in drawn["rows"] if row["name"] == "rollout-1")
    text = "rollout-1 died: killed by signal 9"
    assert drawn["marks"] == [{"name": "worker died", "time": DIED, "y": row["middle"], "text": text}]
    starts = next(track for track in drawn["tracks"] if track["task"] == "worker_started")
    again = starts["start"].index(DIED + 1)
    assert starts["seconds"][again] == STARTED - DIED - 1
    assert abs(starts["y"][again] - row["middle"]) < row["height"] / 2


def test_a_worker_that_died_before_it_did_anything_has_a_row_for_its_mark() -> None:
    died = Event(task="worker_died", actor="reward-3", start=1.0, end=1.0)
    work = Event(task="step", actor="driver", start=0.0, end=2.0, step=0)
    drawn = timeline(run_of([work, died]))
    assert drawn is not None
    assert [row["name"] for row in drawn["rows"]] == ["driver", "reward-3"]
    assert drawn["marks"][0]["y"] == drawn["rows"][1]["middle"]


def test_the_way_of_weights_is_a_bar_with_its_version_from_publication_to_installation() -> None:
    events = separated_run()
    drawn = timeline(run_of(events))
    assert drawn is not None
    track = next(track for track in drawn["tracks"] if track["task"] == "weights_in_flight")
    published = next(event for event in events if event.task == "weights_publish" and event.version == 3)
    installed = [event for event in events if event.task == "update_weights" and event.version == 3]
    bars = {
        (start, round(start + seconds, 3))
        for start, seconds, text in zip(track["start"], track["seconds"], track["text"], strict=True)
        if text.endswith("version 3")
    }
    assert bars == {(round(published.start, 4), round(event.end, 3)) for event in installed}


def test_overlapping_work_of_a_worker_makes_its_row_no_taller_than_two() -> None:
    def heights(worker: str) -> list[float]:
        claims = [Event(task="rollout", actor="rollout", start=0.0, end=9.0, worker=worker) for _ in range(20)]
        drawn = timeline(run_of(claims))
        assert drawn is not None
        return [row["height"] for row in drawn["rows"]]

    assert heights("rollout-0") == [2.0]
    assert heights("") == [20.0]


def test_a_response_of_several_versions_shows_the_first_and_the_last() -> None:
    def sample(last: int) -> Event:
        return Event(task="sample", actor="engine", start=0, end=1, version=3, info={"last_version": last})

    drawn = timeline(run_of([sample(3), sample(5)]))
    assert drawn is not None
    assert drawn["tracks"][0]["text"] == ["1.0 s · version 3", "1.0 s · version 3 to 5"]
