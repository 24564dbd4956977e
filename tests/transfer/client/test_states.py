"""The states of several controllers are joined to one and split again without a loss."""

from hypothesis import given
from hypothesis import strategies as st

from tailrace.transfer.queue.client.shards import Shards
from tailrace.transfer.queue.client.states import join_seen, split_seen
from tailrace.transfer.queue.rows.groups import Intervals


def ranges(numbers: set[int]) -> list[tuple[int, int]]:
    seen = Intervals()
    for number in numbers:
        seen.add(number)
    return seen.ranges()


@given(groups=st.sets(st.integers(-20, 40)), before=st.integers(1, 4), after=st.integers(1, 4))
def test_groups_that_were_seen_are_the_same_for_any_number_of_controllers(
    groups: set[int], before: int, after: int
) -> None:
    seen = [ranges({group // before for group in groups if group % before == number}) for number in range(before)]
    joined = join_seen(seen)
    assert joined == ranges(groups)
    for number in range(after):
        own = {group // after for group in groups if group % after == number}
        assert split_seen(joined, Shards(after), number) == ranges(own)
