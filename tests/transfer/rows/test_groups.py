from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from tailrace.transfer.queue.rows.groups import Intervals


@given(st.lists(st.integers(-20, 20)))
def test_it_is_a_set_kept_as_few_ranges(numbers: list[int]) -> None:
    seen = Intervals()
    for number in numbers:
        seen.add(number)
    assert [number for number in range(-25, 25) if number in seen] == sorted(set(numbers))
    ranges = seen.ranges()
    assert all(start < end for start, end in ranges)
    assert all(end < start for (_, end), (start, _) in pairwise(ranges)), "they would touch"
    assert Intervals(ranges).ranges() == ranges
