"""The requests of claims when things go wrong."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tailrace.errors import ColumnError, PeerLost, QueueError, StaleRowError, WireError
from tailrace.transfer.queue.client.claim import claim_rows
from tailrace.transfer.queue.client.session import Session
from tailrace.transfer.queue.client.shared_memory import frame_memory
from tailrace.transfer.queue.messages import (
    Cells,
    Claim,
    Claimed,
    Nack,
    Read,
    ReadTable,
    Unit,
)
from tailrace.transfer.wire.calls import Call
from tailrace.transfer.wire.frames import Buffer
from tailrace.transfer.wire.messages import Accepted
from tests.transfer.client.sessions import ROWS, UNIT, UNITS, WELCOME, Clock
from tests.transfer.wire.play import Play
from tests.transfer.wire.rows import ints, packed


def claimed(units: Sequence[Sequence[int]]) -> Claimed:
    rows = packed([[*row, 7, 700 + place] for place, row in enumerate(ROWS)])
    tags = packed([[0]] * len(ROWS))
    return Claimed(9, 60.0, rows, packed(units), len(units[0]), ["prompt_ids"], tags)


def cells(*lengths: int) -> Cells:
    """The reply of a unit for rows whose cells lie one after the other in one frame."""
    starts = np.cumsum([0, *lengths[:-1]]) * 8
    return Cells(packed([[length] for length in lengths]), packed([[[0, start]] for start in starts]), [], None)


def claiming(session: Session, units: Sequence[Sequence[int]]) -> Play:
    play = Play(claim_rows(session, "rollout", limit=4, rank=None, timeout=5.0))
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
    play = Play(claim_rows(Session("controller", shared_memory=False), "rollout", limit=4, rank=None, timeout=5.0))
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
        Play(claim_rows(session, "rollout", limit=0, rank=None, timeout=5.0))
