"""A client's directory of the units of a queue. The test makes the answers."""

from tailrace.errors import PeerLost, TailraceError, WireError
from tailrace.transfer.queue.client.directory import Directory, endpoint
from tailrace.transfer.queue.messages import ReadTable, Table, Unit
from tailrace.transfer.wire.sockets import host_id
from tests.transfer.wire.play import Play

HERE, THERE = Unit(0, ["tcp://a:1", "ipc:///a"], host_id(), ""), Unit(3, ["ipc:///b", "tcp://b:1"], "elsewhere", "")


def table(units: list[Unit], *, recovering: bool = False) -> Table:
    return Table(units, {}, [], recovering)


def found(*numbers: int, units: list[Unit]) -> dict[int, Unit | TailraceError]:
    play = Play(Directory("controller").units(numbers))
    assert play.asked() == [("controller", ReadTable)]
    play.answer(table(units))
    result: dict[int, Unit | TailraceError] = play.result
    return result


def test_units_of_this_host_and_elsewhere_are_found() -> None:
    assert found(0, 3, units=[HERE, THERE]) == {0: HERE, 3: THERE}
    assert endpoint(THERE) == "tcp://b:1"


def test_a_unit_that_listens_for_its_own_host_alone_is_reached_from_no_other() -> None:
    error = found(1, units=[Unit(1, ["ipc:///c"], "elsewhere", "")])[1]
    assert isinstance(error, WireError)
    assert "cannot be reached from this host" in str(error)


def test_the_controller_is_asked_once_for_units_and_again_for_one_that_was_lost() -> None:
    directory = Directory("controller")
    play = Play(directory.units([0]))
    play.answer(table([HERE, THERE]))
    play = Play(directory.units([0, 3]))
    assert play.result == {0: HERE, 3: THERE}
    directory.forget(3)
    play = Play(directory.units([0, 3]))
    assert play.asked() == [("controller", ReadTable)]
    play.answer(table([HERE]))
    assert play.result[0] == HERE
    assert isinstance(play.result[3], PeerLost)
    assert "unit 3 is gone; the units of the queue are [0]" in str(play.result[3])


def test_a_controller_that_recovers_is_asked_again_about_a_unit_that_it_does_not_name() -> None:
    directory = Directory("controller")
    Play(directory.units([3])).answer(table([THERE]))
    play = Play(directory.units([0, 3]))
    play.answer(table([], recovering=True))
    assert (play.asked(), play.step.pause_s > 0) == ([], True)
    play.answer()
    assert play.asked() == [("controller", ReadTable)]
    play.answer(table([HERE], recovering=True))
    assert play.result == {0: HERE, 3: THERE}, "one that was known is not forgotten before it is known to be lost"
    play = Play(directory.units([7]))
    play.answer(table([HERE]))
    assert isinstance(play.result[7], PeerLost)


def test_a_unit_that_is_forgotten_or_listed_no_more_is_dropped() -> None:
    dropped: list[Unit] = []
    directory = Directory("controller", dropped=dropped.append)
    Play(directory.read_table()).answer(table([HERE, THERE]))
    directory.forget(3)
    directory.forget(3)
    assert dropped == [THERE]
    Play(directory.read_table()).answer(table([], recovering=True))
    assert dropped == [THERE]
    Play(directory.read_table()).answer(table([THERE]))
    assert dropped == [THERE, HERE]
