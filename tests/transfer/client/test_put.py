"""The requests of puts when things go wrong."""

import pytest

from tailrace.errors import ColumnError, PeerLost, QueueError, StaleRowError, StorageFull
from tailrace.transfer.queue.base import NewRow
from tailrace.transfer.queue.client.put import put_rows
from tailrace.transfer.queue.client.session import Session
from tailrace.transfer.queue.messages import (
    Admit,
    Admitted,
    ReadTable,
    Withdraw,
    Withdrawn,
    Write,
)
from tailrace.transfer.wire.calls import Call
from tailrace.transfer.wire.messages import Accepted
from tests.transfer.client.sessions import ROWS, UNIT, Clock
from tests.transfer.tables import group
from tests.transfer.wire.play import Play
from tests.transfer.wire.rows import ints, packed


def admitted(*units: int) -> Admitted:
    return Admitted(packed(ROWS), list(units))


def putting(session: Session) -> Play:
    play = Play(put_rows(session, group(7, 2), timeout=5.0))
    assert play.asked() == [("controller", Admit)]
    return play


def test_rows_that_are_admitted_are_written_to_every_unit_that_is_named(session: Session) -> None:
    play = putting(session)
    [admit] = play.step.calls
    assert isinstance(admit.message, Admit)
    assert (admit.message.rows, admit.message.wait_s) == (packed([[7, 2, 700], [7, 2, 701]]), 5.0)
    play.answer(admitted(0, 2))
    assert play.asked() == [(UNIT[0], Write), (UNIT[2], Write)]
    [run] = admit.message.runs
    assert play.step.calls[0].message == Write(0, packed(ROWS), [run], None)
    assert [bytes(frame) for frame in play.step.calls[1].frames] == [ints([0, 1, 0, 1]).tobytes()]
    assert play.step.otherwise == [Call("controller", Withdraw(packed(ROWS), packed([[7], [7]])))]
    play.answer(Accepted(), Accepted())
    assert play.result == ROWS


def test_bad_rows_are_refused_before_anything_is_sent(session: Session) -> None:
    with pytest.raises(ColumnError, match="lacks column 'prompt_ids'"):
        Play(put_rows(session, [NewRow(group_id=1, group_size=1, order=1, cells={})], timeout=5.0))
    assert Play(put_rows(session, [], timeout=5.0)).result == []


def test_rows_that_only_one_of_their_units_has_are_withdrawn_too_unless_they_are_in(session: Session) -> None:
    play = putting(session)
    play.answer(admitted(0, 2))
    play.answer(PeerLost("silent"), Accepted())
    assert play.asked() == [("controller", Withdraw)], "the controller might wait for the other one for ever"
    play.answer(Withdrawn(False))
    assert play.result == ROWS
    assert Play(session.directory.units([0])).asked() == [("controller", ReadTable)], "it may be elsewhere by now"


@pytest.mark.parametrize("error", [PeerLost("silent"), StaleRowError("too late"), StorageFull("full")])
def test_rows_that_are_written_nowhere_are_withdrawn_and_admitted_anew(session: Session, error: QueueError) -> None:
    play = putting(session)
    play.answer(admitted(1))
    play.answer(error)
    assert play.asked() == [("controller", Withdraw)]
    play.answer(Withdrawn(True))
    assert (play.asked(), play.step.pause_s > 0) == ([], True)
    play.answer()
    assert play.asked() == [("controller", Admit)]
    play.answer(admitted(2))
    play.answer(Accepted())
    assert play.result == ROWS


def test_rows_that_cannot_be_withdrawn_are_in_the_queue(session: Session) -> None:
    play = putting(session)
    play.answer(admitted(1))
    play.answer(PeerLost("silent, but the controller has heard of it"))
    play.answer(Withdrawn(False))
    assert play.result == ROWS


def test_a_put_that_fails_until_its_time_is_over_says_why(session: Session, clock: Clock) -> None:
    play = putting(session)
    play.answer(admitted(1))
    play.answer(StorageFull("no room"))
    clock.now = 5.0
    with pytest.raises(StorageFull, match="no room"):
        play.answer(Withdrawn(True))


def test_a_put_that_is_refused_by_a_unit_is_withdrawn_and_not_tried_again(session: Session) -> None:
    play = putting(session)
    play.answer(admitted(0, 1))
    play.answer(ColumnError("odd"), Accepted())
    with pytest.raises(ColumnError, match="odd"):
        play.answer(Withdrawn(True))
