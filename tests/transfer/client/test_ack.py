"""The requests of acks and nacks when things go wrong."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from tailrace.errors import ColumnError, LeaseError, PeerLost, StaleRowError, StorageFull, TailraceError
from tailrace.transfer.queue import base
from tailrace.transfer.queue.base import Row, RowId
from tailrace.transfer.queue.client.ack import ack_rows, nack_rows
from tailrace.transfer.queue.client.session import Session
from tailrace.transfer.queue.messages import (
    Ack,
    Nack,
    Write,
    row_ids,
)
from tailrace.transfer.wire.messages import Accepted
from tailrace.types import Value
from tests.transfer.client.sessions import ROWS, UNIT, Clock
from tests.transfer.tables import tokens
from tests.transfer.wire.play import Play
from tests.transfer.wire.rows import packed


def held(*units: tuple[int, ...]) -> base.Claim:
    rows = [
        Row(id=row, group_id=7, order=place, cells={}, units=own)
        for place, (row, own) in enumerate(zip(ROWS, units, strict=True))
    ]
    return base.Claim(lease_id=9, lease_s=60.0, task="rollout", rows=tuple(rows))


def acking(session: Session, *units: tuple[int, ...]) -> Play:
    outputs: Mapping[RowId, Mapping[str, Value]] = {row: {"response_ids": tokens(2)} for row in ROWS}
    return Play(ack_rows(session, held(*units), outputs, timeout=5.0))


def written(play: Play) -> dict[str, list[RowId]]:
    """The rows that are being written, by endpoint of the unit."""
    return {call.to: row_ids(call.message.rows) for call in play.step.calls if isinstance(call.message, Write)}


def test_outputs_are_written_to_every_unit_of_their_row_before_they_count(session: Session) -> None:
    play = acking(session, (0, 1), (1,))
    assert written(play) == {UNIT[0]: [ROWS[0]], UNIT[1]: ROWS}
    assert {call.message.tag for call in play.step.calls if isinstance(call.message, Write)} == {9}
    play.answer(Accepted(), Accepted())
    [ack] = play.step.calls
    assert isinstance(ack.message, Ack)
    assert (ack.to, ack.message.lease_id, ack.message.rows, ack.message.missed) == ("controller", 9, packed(ROWS), [])
    play.answer(Accepted())


def test_nothing_is_given_back_of_a_claim_all_of_which_was_acked_here(session: Session) -> None:
    claim = held((0,), (0,))
    for row in ROWS:
        assert Play(nack_rows(session, claim, None)).asked() == [("controller", Nack)], "some is left"
        play = Play(ack_rows(session, claim, {row: {"response_ids": tokens(2)}}, timeout=5.0))
        play.answer(Accepted())
        play.answer(Accepted())
    assert Play(nack_rows(session, claim, None)).asked() == []
    assert Play(nack_rows(session, claim, ROWS)).asked() == [("controller", Nack)], "these are named: an error"
    other = replace(claim, lease_id=10)
    assert Play(nack_rows(session, other, None)).asked() == [("controller", Nack)]


def test_an_ack_that_fails_leaves_its_rows_to_be_given_back(session: Session) -> None:
    play = acking(session, (0,), (0,))
    play.answer(Accepted())
    with pytest.raises(PeerLost):
        play.answer(PeerLost("silent"))
    assert Play(nack_rows(session, held((0,), (0,)), None)).asked() == [("controller", Nack)]


def test_a_unit_that_is_lost_is_missed_where_each_row_has_another(session: Session) -> None:
    play = acking(session, (0, 1), (1, 2))
    play.answer(Accepted(), Accepted(), PeerLost("silent"))
    [ack] = play.step.calls
    assert isinstance(ack.message, Ack)
    assert ack.message.missed == [2]


def test_a_row_is_lost_with_the_unit_that_alone_has_it(session: Session) -> None:
    play = acking(session, (0, 1), (2,))
    with pytest.raises(StaleRowError, match=r"RowId\(.*\) cannot be written: it is lost with its units \(2,\)"):
        play.answer(Accepted(), Accepted(), PeerLost("silent"))


def test_outputs_that_find_no_room_are_written_again_to_the_unit_that_was_full(session: Session) -> None:
    play = acking(session, (0, 1), (1,))
    play.answer(Accepted(), StorageFull("no room"))
    assert play.step.pause_s > 0
    play.answer()
    assert written(play) == {UNIT[1]: ROWS}
    play.answer(Accepted())
    assert play.asked() == [("controller", Ack)]


def test_outputs_that_find_no_room_until_the_time_is_over_are_an_error(session: Session, clock: Clock) -> None:
    play = acking(session, (0,), (0,))
    clock.now = 5.0
    with pytest.raises(StorageFull, match="no room"):
        play.answer(StorageFull("no room"))


def test_outputs_of_a_row_that_is_gone_are_an_error(session: Session) -> None:
    play = acking(session, (0,), (0,))
    with pytest.raises(StaleRowError, match="has left"):
        play.answer(StaleRowError("has left"))


def test_wrong_outputs_are_refused_before_anything_is_sent(session: Session) -> None:
    for output, error in (({}, r"missing: \['response_ids'\]"), ({"response_ids": "text"}, "expected a 1-D int64")):
        with pytest.raises(ColumnError, match=error):
            Play(ack_rows(session, held((0,), (0,)), {ROWS[0]: output}, timeout=5.0))


@pytest.mark.parametrize(
    ("answer", "error", "text"),
    [
        (StaleRowError("it is gone"), StaleRowError, "it is gone"),
        (LeaseError("not under this lease"), LeaseError, "not under this lease"),
        (ColumnError("its outputs are missing"), LeaseError, "is acked with a claim that it is not in"),
    ],
)
def test_outputs_of_a_row_that_is_not_of_the_claim_are_not_written_and_the_controller_says_why(
    session: Session, answer: TailraceError, error: type[TailraceError], text: str
) -> None:
    outputs = {row: {"response_ids": tokens(1)} for row in (ROWS[0], RowId(8, 8))}
    play = Play(ack_rows(session, held((0,), (0,)), outputs, timeout=5.0))
    [ack] = play.step.calls
    assert isinstance(ack.message, Ack)
    assert (row_ids(ack.message.rows), ack.message.runs) == ([RowId(8, 8)], [])
    with pytest.raises(error, match=text):
        play.answer(answer)


def test_an_ack_of_nothing_says_nothing(session: Session) -> None:
    assert Play(ack_rows(session, held((0,), (0,)), {}, timeout=5.0)).asked() == []
