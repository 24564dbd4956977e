"""Who is asked what when things go wrong; the answers are made here."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tailrace.config.columns import COLUMNS
from tailrace.errors import ColumnError, LeaseError, PeerLost, QueueError, StaleRowError, StorageFull, WireError
from tailrace.transfer.queue import base
from tailrace.transfer.queue.base import NewRow, Row, RowId
from tailrace.transfer.queue.client import operations
from tailrace.transfer.queue.client.memory import frame_memory
from tailrace.transfer.queue.client.session import Session
from tailrace.transfer.queue.messages import (
    Ack,
    Admit,
    Admitted,
    Cells,
    Claim,
    Claimed,
    Nack,
    Read,
    ReadTable,
    Table,
    Unit,
    Withdraw,
    Withdrawn,
    Write,
    row_ids,
)
from tailrace.transfer.wire.calls import Call
from tailrace.transfer.wire.frames import Buffer
from tailrace.transfer.wire.messages import Accepted
from tailrace.types import Value
from tests.transfer.tables import ACTOR, REWARD, ROLLOUT, group, tokens
from tests.transfer.wire.play import Play
from tests.transfer.wire.rows import ints, packed

UNITS = [Unit(number, [f"tcp://unit:{number}"], "elsewhere", "") for number in range(3)]
WELCOME = Table(UNITS, dict(COLUMNS), [ROLLOUT, REWARD, ACTOR])
UNIT = [unit.endpoints[0] for unit in UNITS]
ROWS = [RowId(4, 1), RowId(5, 0)]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def session(clock: Clock) -> Session:
    """One that knows the table."""
    made = Session("controller", shared_memory=False, clock=clock)
    play = Play(made.prepare())
    assert play.asked() == [("controller", ReadTable)]
    play.answer(WELCOME)
    return made


def admitted(*units: int) -> Admitted:
    return Admitted(packed(ROWS), list(units))


def putting(session: Session) -> Play:
    play = Play(operations.put(session, group(7, 2), timeout=5.0))
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
        Play(operations.put(session, [NewRow(group_id=1, group_size=1, order=1, cells={})], timeout=5.0))
    assert Play(operations.put(session, [], timeout=5.0)).result == []


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


# Claims


def claimed(units: Sequence[Sequence[int]]) -> Claimed:
    rows = packed([[*row, 7, 700 + place] for place, row in enumerate(ROWS)])
    tags = packed([[0]] * len(ROWS))
    return Claimed(9, 60.0, rows, packed(units), len(units[0]), ["prompt_ids"], tags)


def cells(*lengths: int) -> Cells:
    """Of rows whose cells lie one after the other in one frame."""
    starts = np.cumsum([0, *lengths[:-1]]) * 8
    return Cells(packed([[length] for length in lengths]), packed([[[0, start]] for start in starts]), [], None)


def claiming(session: Session, units: Sequence[Sequence[int]]) -> Play:
    play = Play(operations.claim(session, "rollout", limit=4, rank=None, timeout=5.0))
    assert [call.message for call in play.step.calls] == [Claim("rollout", 4, None, 5.0)]
    play.answer(claimed(units))
    return play


def test_cells_come_from_all_units_at_once_and_to_the_right_rows(session: Session) -> None:
    play = claiming(session, [[2], [0]])
    assert play.asked() == [(UNIT[0], Read), (UNIT[2], Read)]
    assert play.step.calls[0].message == Read(packed([ROWS[1]]), ["prompt_ids"], packed([[0]]), False)
    assert play.step.otherwise == [Call("controller", Nack(9, None))]
    play.answer(cells(1), cells(1), frames=(ints([5]).tobytes(),))
    assert [(row.id, row.group_id, row.order, row.units) for row in play.result.rows] == [
        (ROWS[0], 7, 700, (2,)),
        (ROWS[1], 7, 701, (0,)),
    ]
    assert (play.result.lease_id, play.result.lease_s, play.result.task) == (9, 60.0, "rollout")


@pytest.mark.parametrize("error", [PeerLost("silent"), StaleRowError("not stored")])
def test_a_row_comes_from_its_other_unit_where_the_first_does_not_have_it(session: Session, error: QueueError) -> None:
    play = claiming(session, [[0, 1], [2, -1]])
    assert play.asked() == [(UNIT[0], Read), (UNIT[2], Read)]
    play.answer(error, cells(1), frames=(ints([5]).tobytes(),))
    assert play.asked() == [(UNIT[1], Read)]
    play.answer(cells(2), frames=(ints([6, 7]).tobytes(),))
    assert [row.cells["prompt_ids"].tolist() for row in play.result.rows] == [[6, 7], [5]]
    assert [row.units for row in play.result.rows] == [(0, 1), (2,)]


def test_a_lease_whose_cells_no_unit_has_is_given_back_and_rows_are_claimed_again(session: Session) -> None:
    play = claiming(session, [[0, 1], [0, 1]])
    play.answer(PeerLost("silent"))
    play.answer(PeerLost("silent"))
    assert [call.message for call in play.step.calls] == [Nack(9, None)]
    play.answer(Accepted())
    assert (play.asked(), play.step.pause_s > 0) == ([], True)
    play.answer()
    assert play.asked() == [("controller", Claim)]


def test_a_claim_that_fails_until_its_time_is_over_says_why(session: Session, clock: Clock) -> None:
    play = claiming(session, [[0], [0]])
    play.answer(StaleRowError("not stored"))
    clock.now = 5.0
    with pytest.raises(StaleRowError, match="not stored"):
        play.answer(Accepted())


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (Cells(packed([[1]]), packed([[[0, 0]]]), [], None), "got 1 cells in 1 places, asked for 2 x 1"),
        (cells(1, 2), "'prompt_ids': got cells that do not lie in the memory that came"),
        (Cells(packed([[1], [1]]), packed([[[0, 0]], [[1, 0]]]), [], None), "in other memory than the 1 pieces"),
        (Cells(packed([[1], [-1]]), packed([[[0, 0]], [[0, 8]]]), [], None), "that do not lie in the memory"),
        (Cells(packed([[1], [2**60]]), packed([[[0, 0]], [[0, 8]]]), [], None), "that do not lie in the memory"),
        (Cells(packed([[1], [1]]), packed([[[0, 0]], [[0, -8]]]), [], None), "that do not lie in the memory"),
        (Accepted(), "got the answer Accepted, expected Cells"),
    ],
)
def test_cells_that_cannot_be_are_an_error_and_the_lease_is_given_back(
    session: Session, answer: Cells, error: str
) -> None:
    play = claiming(session, [[0], [0]])
    play.answer(answer, frames=(bytes(16),))
    assert [call.message for call in play.step.calls] == [Nack(9, None)]
    with pytest.raises((WireError, ColumnError), match=error):
        play.answer(Accepted())


def test_the_table_is_learned_before_anything_is_leased() -> None:
    play = Play(
        operations.claim(Session("controller", shared_memory=False), "rollout", limit=4, rank=None, timeout=5.0)
    )
    assert play.asked() == [("controller", ReadTable)]
    play.answer(WELCOME)
    assert play.asked() == [("controller", Claim)]


def test_every_answer_is_opened_before_one_of_them_is_an_error(session: Session, monkeypatch: Any) -> None:
    opened: list[Unit] = []

    def open_memory(unit: Unit, cells: Cells, frames: Sequence[Buffer]) -> list[memoryview]:
        opened.append(unit)
        return [frame_memory(frame) for frame in frames]

    monkeypatch.setattr(session.memory, "open", open_memory)
    play = claiming(session, [[0], [2]])
    play.answer(WireError("odd"), cells(1, 1), frames=(bytes(8),))
    assert opened == [UNITS[2]], "a pin that nobody opens is never given back"
    with pytest.raises(WireError, match="odd"):
        play.answer(Accepted())


def test_a_limit_below_one_is_refused_before_anything_is_sent(session: Session) -> None:
    with pytest.raises(QueueError, match="at least 1, got 0"):
        Play(operations.claim(session, "rollout", limit=0, rank=None, timeout=5.0))


# Acks


def held(*units: tuple[int, ...]) -> base.Claim:
    rows = [
        Row(id=row, group_id=7, order=place, cells={}, units=own)
        for place, (row, own) in enumerate(zip(ROWS, units, strict=True))
    ]
    return base.Claim(lease_id=9, lease_s=60.0, task="rollout", rows=tuple(rows))


def acking(session: Session, *units: tuple[int, ...]) -> Play:
    outputs: Mapping[RowId, Mapping[str, Value]] = {row: {"response_ids": tokens(2)} for row in ROWS}
    return Play(operations.ack(session, held(*units), outputs, timeout=5.0))


def written(play: Play) -> dict[str, list[RowId]]:
    """The rows that are written, by unit."""
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
        assert Play(operations.nack(session, claim, None)).asked() == [("controller", Nack)], "some is left"
        play = Play(operations.ack(session, claim, {row: {"response_ids": tokens(2)}}, timeout=5.0))
        play.answer(Accepted())
        play.answer(Accepted())
    assert Play(operations.nack(session, claim, None)).asked() == []
    assert Play(operations.nack(session, claim, ROWS)).asked() == [("controller", Nack)], "these are named: an error"
    other = replace(claim, lease_id=10)
    assert Play(operations.nack(session, other, None)).asked() == [("controller", Nack)]


def test_an_ack_that_fails_leaves_its_rows_to_be_given_back(session: Session) -> None:
    play = acking(session, (0,), (0,))
    play.answer(Accepted())
    with pytest.raises(PeerLost):
        play.answer(PeerLost("silent"))
    assert Play(operations.nack(session, held((0,), (0,)), None)).asked() == [("controller", Nack)]


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
            Play(operations.ack(session, held((0,), (0,)), {ROWS[0]: output}, timeout=5.0))


def test_outputs_of_a_row_that_is_not_of_the_claim_are_not_written_and_the_controller_says_why(
    session: Session,
) -> None:
    outputs = {row: {"response_ids": tokens(1)} for row in (ROWS[0], RowId(8, 8))}
    play = Play(operations.ack(session, held((0,), (0,)), outputs, timeout=5.0))
    [ack] = play.step.calls
    assert isinstance(ack.message, Ack)
    assert row_ids(ack.message.unwritten) == [RowId(8, 8)]
    with pytest.raises(LeaseError, match="not under this lease"):
        play.answer(LeaseError("not under this lease"))


def test_an_ack_of_nothing_says_nothing(session: Session) -> None:
    assert Play(operations.ack(session, held((0,), (0,)), {}, timeout=5.0)).asked() == []
