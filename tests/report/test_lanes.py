from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from tailrace.events import Event
from tailrace.report.lanes import assign_lanes

spans = st.lists(
    st.tuples(st.integers(0, 50), st.integers(0, 20)).map(
        lambda drawn: Event(task="sample", actor="engine", start=drawn[0], end=drawn[0] + drawn[1])
    )
)


@given(spans)
def test_no_two_spans_of_a_lane_overlap(events: list[Event]) -> None:
    lanes = assign_lanes(events)
    for lane in set(lanes):
        inside = [event for event, of in zip(events, lanes, strict=True) if of == lane]
        inside.sort(key=lambda event: (event.start, event.end))
        assert all(before.end <= after.start for before, after in pairwise(inside))


@given(spans)
def test_there_are_as_many_lanes_as_spans_at_one_time(events: list[Event]) -> None:
    lasting = [event for event in events if event.end > event.start]
    busiest = max((sum(e.start <= at.start < e.end for e in lasting) for at in lasting), default=0)
    assert len(set(assign_lanes(lasting))) == busiest


def test_a_span_takes_the_lowest_lane_that_is_free() -> None:
    times = [(0, 10), (1, 2), (1, 5), (3, 4), (10, 11)]
    events = [Event(task="sample", actor="engine", start=start, end=end) for start, end in times]
    assert assign_lanes(events) == [0, 1, 2, 1, 0]
