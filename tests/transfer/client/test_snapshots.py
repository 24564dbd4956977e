"""The errors of a snapshot or a restore when a unit does not answer. The test makes the answers."""

import pytest

from tailrace.config.columns import COLUMNS
from tailrace.errors import PeerLost, StaleRowError
from tailrace.transfer.queue.base import RowId
from tailrace.transfer.queue.client import snapshots
from tailrace.transfer.queue.client.session import Session
from tailrace.transfer.queue.messages import (
    Admitted,
    Cells,
    Export,
    Exported,
    Read,
    Release,
    Restore,
    Table,
    Unit,
    Withdraw,
    Withdrawn,
    Write,
)
from tailrace.transfer.queue.policies.base import CellFacts
from tailrace.transfer.queue.rows.state import ControlState, RowRecord
from tailrace.transfer.queue.snapshot import encode_snapshot
from tailrace.transfer.wire.calls import Call
from tailrace.transfer.wire.messages import Accepted
from tests.transfer.tables import ACTOR, REWARD, ROLLOUT
from tests.transfer.wire.play import Play
from tests.transfer.wire.rows import ints, packed

UNITS = [Unit(number, [f"tcp://unit:{number}"], "elsewhere", "") for number in range(2)]
TASKS = [ROLLOUT, REWARD, ACTOR]
ROW = RowId(0, 0)
STATE = ControlState(
    generations=[0],
    next_lease=1,
    version=0,
    rows=[
        RowRecord(
            id=ROW,
            group_id=7,
            group_size=1,
            order=1,
            consumed={},
            facts=CellFacts(lengths={"prompt_ids": 1}),
            units=(0,),
        )
    ],
    seen=[(7, 8)],
    lost=[],
    remade={},
    consumed=[0, 0, 0],
    expired=[0, 0, 0],
)
RELEASE = Call("controller", Release(5))


@pytest.fixture
def session() -> Session:
    made = Session("controller", shared_memory=False)
    Play(made.prepare()).answer(Table(UNITS, dict(COLUMNS), TASKS))
    return made


def restoring(session: Session) -> Play:
    data = encode_snapshot(TASKS, COLUMNS, STATE, {ROW: ints([5]).tobytes()})
    play = Play(snapshots.restore(session, data))
    assert play.asked() == [("controller", Restore)]
    play.answer(Admitted(packed([ROW]), [0, 1]))
    assert play.asked() == [("tcp://unit:0", Write), ("tcp://unit:1", Write)]
    play.answer(PeerLost("silent"), Accepted())
    assert play.asked() == [("controller", Withdraw)], "the controller might wait for the other one for ever"
    return play


def test_a_snapshot_that_one_of_the_units_did_not_get_is_withdrawn_and_an_error(session: Session) -> None:
    play = restoring(session)
    with pytest.raises(PeerLost, match="silent"):
        play.answer(Withdrawn(True))


def test_a_snapshot_is_restored_where_the_controller_has_lost_that_unit_too(session: Session) -> None:
    play = restoring(session)
    play.answer(Withdrawn(False))
    assert play.asked() == []


def reading(session: Session) -> Play:
    play = Play(snapshots.snapshot(session, timeout=5.0))
    assert play.asked() == [("controller", Export)]
    play.answer(Exported(STATE, 5))
    assert play.asked() == [("tcp://unit:0", Read)]
    return play


def test_rows_are_held_for_a_snapshot_until_it_was_read_and_no_longer(session: Session) -> None:
    play = reading(session)
    play.answer(Cells(packed([[1]]), packed([[[0, 0]]]), [], None), frames=(ints([5]).tobytes(),))
    assert play.step.calls == [RELEASE]
    play.answer(Accepted())
    assert play.result == encode_snapshot(TASKS, COLUMNS, STATE, {ROW: ints([5]).tobytes()})
    assert session.due() == []


def test_rows_that_were_held_for_a_snapshot_that_fails_are_let_go(session: Session) -> None:
    play = reading(session)
    play.answer(StaleRowError("gone"))
    assert session.due() == [RELEASE]
