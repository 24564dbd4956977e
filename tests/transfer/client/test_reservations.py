"""Puts whose cells are written while the controller is still being asked. The test makes the answers."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tailrace.config.columns import COLUMNS
from tailrace.errors import ColumnError, GroupExists, PeerLost, QueueError, QueueTimeout, StorageFull
from tailrace.transfer.queue.base import NewRow, RowId
from tailrace.transfer.queue.client.put import put_rows
from tailrace.transfer.queue.client.session import Session
from tailrace.transfer.queue.messages import (
    Admit,
    Admitted,
    Done,
    ReadTable,
    Reserve,
    Reserved,
    Table,
    Unit,
    Withdraw,
    Withdrawn,
    Write,
)
from tailrace.transfer.queue.storage.arena import ArenaStorage
from tailrace.transfer.wire.calls import Call
from tailrace.transfer.wire.messages import Accepted
from tailrace.transfer.wire.sockets import host_id
from tests.transfer.client.sessions import Clock
from tests.transfer.tables import ACTOR, REWARD, ROLLOUT
from tests.transfer.wire.play import Play
from tests.transfer.wire.rows import packed

PROMPT = np.arange(2**14)
ROWS = [NewRow(group_id=7, group_size=1, order=7, cells={"prompt_ids": PROMPT})]
IDS = [RowId(4, 1)]
ENDPOINTS = ["ipc:///unit-0", "ipc:///unit-1", "ipc:///unit-2"]


class Desk:
    """A client of a controller and of units that share memory with it."""

    def __init__(self, directory: Path, units: int) -> None:
        self.arenas = [ArenaStorage(parent=directory, max_bytes=2**22, segment_bytes=2**18) for _ in range(units)]
        self.clock = Clock()
        self.session = Session("controller", shared_memory=True, clock=self.clock)
        known = [
            Unit(number, [ENDPOINTS[number]], host_id(), str(arena.directory))
            for number, arena in enumerate(self.arenas)
        ]
        Play(self.session.prepare()).answer(Table(known, dict(COLUMNS), [ROLLOUT, REWARD, ACTOR]))

    def put(self) -> Play:
        return Play(put_rows(self.session, ROWS, timeout=5.0))

    def reserved(self, number: int) -> Reserved:
        place = self.arenas[number].reserve(PROMPT.nbytes)
        return Reserved(place.serial, str(place.segment), place.offset)

    def guessing(self) -> tuple[Play, int, Reserved]:
        """A put that waits to be admitted while its cells already have a place at a unit."""
        play = self.put()
        number = ENDPOINTS.index(play.step.calls[0].to)
        place = self.reserved(number)
        play.answer(place)
        return play, number, place

    def written(self, number: int) -> list[int]:
        """The contents of the place that was reserved last."""
        arena = self.arenas[number]
        [*_, place] = arena._reserved.values()
        return np.frombuffer(arena.memory(place), np.int64).tolist()  # type: ignore[no-any-return]

    def given_back(self) -> list[Call]:
        return [call for call in self.session.due() if isinstance(call.message, Done)]


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path, 1)


def admitted(*units: int) -> Admitted:
    return Admitted(packed(IDS), list(units))


def admit_of(play: Play) -> Admit:
    message = play.step.calls[-1].message
    assert isinstance(message, Admit)
    return message


def test_cells_are_written_before_the_controller_has_said_where_and_the_write_names_their_place(desk: Desk) -> None:
    play = desk.put()
    assert play.asked() == [(ENDPOINTS[0], Reserve)]
    place = desk.reserved(0)
    play.answer(place)
    assert play.asked() == [("controller", Admit)]
    admit = admit_of(play)
    assert (admit.preferred, admit.wait_s) == ([0], 0.0)
    assert [call.message for call in play.step.otherwise] == [Done([], [place.place])]
    assert desk.written(0) == PROMPT.tolist()
    play.answer(admitted(0))
    [write] = play.step.calls
    assert (write.to, write.message, write.frames) == (
        ENDPOINTS[0],
        Write(0, packed(IDS), admit.runs, place.place),
        (),
    )
    assert [call.message for call in play.step.otherwise][1:] == [Done([], [place.place])]
    play.answer(Accepted())
    assert play.result == IDS
    assert desk.given_back() == []


def test_a_place_where_the_rows_do_not_go_is_given_back(tmp_path: Path) -> None:
    desk = Desk(tmp_path, 2)
    play, likely, guessed = desk.guessing()
    other = 1 - likely
    play.answer(admitted(other))
    assert desk.given_back() == [Call(ENDPOINTS[likely], Done([], [guessed.place]))]
    assert play.asked() == [(ENDPOINTS[other], Reserve)]
    place = desk.reserved(other)
    play.answer(place)
    assert desk.written(other) == PROMPT.tolist()
    [write] = play.step.calls
    assert isinstance(write.message, Write)
    assert (write.to, write.message.place) == (ENDPOINTS[other], place.place)


def test_nobody_waits_for_room_with_a_place(desk: Desk) -> None:
    play, _, guessed = desk.guessing()
    play.answer(QueueTimeout("no room at once"))
    assert desk.given_back() == [Call(ENDPOINTS[0], Done([], [guessed.place]))]
    assert play.asked() == [("controller", Admit)]
    assert (admit_of(play).preferred, admit_of(play).wait_s, play.step.calls[0].wait_s) == ([], 5.0, 5.0)
    desk.clock.now += 2.0
    play.answer(admitted(0))
    assert play.asked() == [(ENDPOINTS[0], Reserve)]
    play = desk.put()
    assert play.asked() == [("controller", Admit)], "who had to wait asks first the next time"
    play.answer(admitted(0))
    assert desk.put().asked() == [(ENDPOINTS[0], Reserve)], "and no more when he had not"


def test_a_put_that_may_not_wait_is_over_when_there_is_no_room_at_once(desk: Desk) -> None:
    play = Play(put_rows(desk.session, ROWS, timeout=0.0))
    play.answer(desk.reserved(0))
    with pytest.raises(QueueTimeout, match="no room at once"):
        play.answer(QueueTimeout("no room at once"))
    assert len(desk.given_back()) == 1


@pytest.mark.parametrize("error", [GroupExists("before"), ColumnError("odd"), PeerLost("no controller")])
def test_rows_that_are_refused_leave_no_place(desk: Desk, error: QueueError) -> None:
    play, _, _ = desk.guessing()
    with pytest.raises(type(error), match=str(error)):
        play.answer(error)
    assert len(desk.given_back()) == 1


def test_a_unit_without_room_for_a_guess_may_have_it_when_the_rows_are_admitted(desk: Desk) -> None:
    play = desk.put()
    play.answer(StorageFull("just now"))
    assert play.asked() == [("controller", Admit)]
    assert (admit_of(play).preferred, admit_of(play).full) == ([], [0])
    play.answer(admitted(0))
    assert play.asked() == [(ENDPOINTS[0], Reserve)]
    play.answer(desk.reserved(0))
    play.answer(Accepted())
    assert play.result == IDS


def test_a_unit_that_is_lost_is_looked_for_anew(desk: Desk) -> None:
    play = desk.put()
    play.answer(PeerLost("silent"))
    play.answer(admitted(0))
    assert play.asked() == [("controller", ReadTable)]


def test_rows_that_could_not_be_written_where_their_cells_lie_are_admitted_anew(desk: Desk) -> None:
    play, _, place = desk.guessing()
    play.answer(admitted(0))
    play.answer(StorageFull("after all"))
    assert (play.asked(), desk.given_back()) == (
        [("controller", Withdraw)],
        [Call(ENDPOINTS[0], Done([], [place.place]))],
    )
    play.answer(Withdrawn(True))
    play.answer()
    assert play.asked() == [("controller", Admit)], "it is not guessed a second time"
    assert admit_of(play).full == [0]


def test_units_are_guessed_in_turn_and_as_many_as_rows_went_to(tmp_path: Path) -> None:
    desk = Desk(tmp_path, 3)

    def guess() -> Sequence[int]:
        play = desk.put()
        guessed = [ENDPOINTS.index(call.to) for call in play.step.calls]
        play.answer(*map(desk.reserved, guessed))
        play.answer(admitted(*replicas))
        return guessed

    replicas = [0]
    assert sorted(number for _ in range(3) for number in guess()) == [0, 1, 2]
    replicas = [0, 1]
    guess()
    assert len(set(guess())) == 2


def test_nothing_is_guessed_for_few_bytes_or_where_memory_is_not_shared(desk: Desk) -> None:
    few = [NewRow(group_id=7, group_size=1, order=7, cells={"prompt_ids": PROMPT[:2000]})]
    assert Play(put_rows(desk.session, few, timeout=5.0)).asked() == [("controller", Admit)]
