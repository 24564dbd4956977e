"""When storage units are added and released."""

from hypothesis import assume, given
from hypothesis import strategies as st

from tailrace.planning.queue_units import Stored, wanted


def units(*used: int) -> list[Stored]:
    return [Stored(bytes, 100) for bytes in used]


def test_a_unit_is_added_when_most_of_the_room_is_used_and_released_when_the_others_have_plenty() -> None:
    assert wanted(units(79), puts_wait=False, least=1, most=2) == "hold"
    assert wanted(units(80), puts_wait=False, least=1, most=2) == "add"
    assert wanted(units(90, 70), puts_wait=True, least=1, most=2) == "hold", "there may be no more"
    assert wanted(units(30, 11), puts_wait=False, least=1, most=2) == "hold"
    assert wanted(units(30, 10), puts_wait=False, least=1, most=2) == "release"
    assert wanted(units(0, 0), puts_wait=False, least=2, most=3) == "hold", "there may be no fewer"


def test_a_unit_is_added_earlier_where_puts_wait_and_not_where_they_wait_for_something_else() -> None:
    assert wanted(units(41), puts_wait=True, least=1, most=2) == "add"
    assert wanted(units(40), puts_wait=True, least=1, most=2) == "hold", "another unit would have to leave at once"


@given(
    st.lists(st.builds(Stored, st.integers(0, 1000), st.integers(1, 1000)), min_size=1, max_size=6),
    st.builds(Stored, st.just(0), st.integers(1, 1000)),
    st.booleans(),
)
def test_a_unit_that_was_added_does_not_leave_before_rows_have_left(
    known: list[Stored], new: Stored, puts_wait: bool
) -> None:
    assume(wanted(known, puts_wait=puts_wait, least=1, most=9) == "add")
    assert wanted([*known, new], puts_wait=False, least=1, most=9) != "release"


@given(st.lists(st.builds(Stored, st.integers(0, 400), st.integers(500, 1000)), min_size=2, max_size=6), st.booleans())
def test_a_unit_that_has_left_does_not_come_back_before_rows_have_come(known: list[Stored], puts_wait: bool) -> None:
    assume(wanted(known, puts_wait=puts_wait, least=1, most=9) == "release")
    rest = [
        Stored(unit.bytes + (known[-1].bytes if place == 0 else 0), unit.max_bytes)
        for place, unit in enumerate(known[:-1])
    ]
    assert wanted(rest, puts_wait=puts_wait, least=1, most=9) != "add"
