"""Where servers are, and what an outcome must be; the answers are made here."""

import pytest

from tailrace.errors import LeaseError, PeerLost, TailraceError, WireError
from tailrace.transfer.queue.wire.calls import Directory, endpoint, expect
from tailrace.transfer.queue.wire.frames import Reply
from tailrace.transfer.queue.wire.messages import Accepted, Admitted, Look, Unit, Welcome
from tailrace.transfer.queue.wire.sockets import host_id
from tests.transfer.wire.play import Play

HERE, THERE = Unit(0, ["tcp://a:1", "ipc:///a"], host_id(), ""), Unit(3, ["ipc:///b", "tcp://b:1"], "elsewhere", "")


def found(*numbers: int, units: list[Unit]) -> dict[int, Unit | TailraceError]:
    play = Play(Directory("controller").units(numbers))
    assert play.asked() == [("controller", Look)]
    play.answer(Welcome(1, units))
    result: dict[int, Unit | TailraceError] = play.result
    return result


def test_a_unit_of_this_host_is_reached_by_ipc_and_one_elsewhere_by_tcp() -> None:
    assert found(0, 3, units=[HERE, THERE]) == {0: HERE, 3: THERE}
    assert (endpoint(HERE), endpoint(THERE)) == ("ipc:///a", "tcp://b:1")


def test_a_unit_that_listens_for_its_own_host_alone_is_reached_from_no_other() -> None:
    error = found(1, units=[Unit(1, ["ipc:///c"], "elsewhere", "")])[1]
    assert isinstance(error, WireError)
    assert "cannot be reached from this host" in str(error)


def test_the_controller_is_asked_once_for_units_and_again_for_one_that_was_lost() -> None:
    directory = Directory("controller")
    play = Play(directory.units([0]))
    play.answer(Welcome(1, [HERE, THERE]))
    play = Play(directory.units([0, 3]))
    assert play.result == {0: HERE, 3: THERE}
    directory.forget(3)
    play = Play(directory.units([0, 3]))
    assert play.asked() == [("controller", Look)]
    play.answer(Welcome(1, [HERE]))
    assert play.result[0] == HERE
    assert isinstance(play.result[3], PeerLost)
    assert "unit 3 is gone; the units of the queue are [0]" in str(play.result[3])


def test_an_outcome_is_the_answer_that_was_expected_or_an_error() -> None:
    assert expect(Reply(Accepted()), Accepted) == Accepted()
    with pytest.raises(LeaseError):
        expect(LeaseError("gone"), Accepted)
    with pytest.raises(WireError, match="got the answer Admitted, expected Accepted"):
        expect(Reply(Admitted(b"", [])), Accepted)
