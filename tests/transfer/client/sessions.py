"""A client whose servers are played by a test."""

from tailrace.config.columns import COLUMNS
from tailrace.transfer.queue.base import RowId
from tailrace.transfer.queue.client.session import Session
from tailrace.transfer.queue.messages import ReadTable, Table, Unit
from tests.transfer.tables import ACTOR, REWARD, ROLLOUT
from tests.transfer.wire.play import Play

UNITS = [Unit(number, [f"tcp://unit:{number}"], "elsewhere", "") for number in range(3)]
WELCOME = Table(UNITS, dict(COLUMNS), [ROLLOUT, REWARD, ACTOR])
UNIT = [unit.endpoints[0] for unit in UNITS]
ROWS = [RowId(4, 1), RowId(5, 0)]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def informed_session(clock: Clock) -> Session:
    """A session that knows the table."""
    made = Session("controller", shared_memory=False, clock=clock)
    play = Play(made.prepare())
    assert play.asked() == [("controller", ReadTable)]
    play.answer(WELCOME)
    return made
