"""A client asks the controller about silent units, and gives up units that the controller no longer names."""

from tailrace.errors import PeerLost
from tailrace.transfer.queue.client.liveness import LivenessCheck
from tailrace.transfer.queue.messages import ReadTable, Table, Unit
from tailrace.transfer.wire.calls import Call
from tailrace.transfer.wire.frames import Reply

TABLE = Reply(Table([Unit(1, ["ipc://a", "tcp://a"], "host", "")], {}, []))
QUESTION = Call("ipc://c", ReadTable())


def test_nothing_is_asked_when_nobody_is_silent_or_the_controller_itself() -> None:
    check = LivenessCheck(["ipc://c"])
    assert check.question(set()) is None
    assert check.question({"ipc://c"}) is None


def test_one_question_is_asked_at_a_time_and_the_next_one_a_moment_later() -> None:
    now = 0.0
    check = LivenessCheck(["ipc://c"], lambda: now)
    silent = {"ipc://a"}
    assert check.question(silent) == QUESTION
    assert check.question(silent) is None
    check.hear(PeerLost("silent, too"))
    assert check.gone(silent) == set()
    assert check.question(silent) is None
    now = 1.0
    assert check.question(silent) == QUESTION


def test_a_server_is_gone_that_was_asked_about_and_is_no_unit_and_still_silent() -> None:
    check = LivenessCheck(["ipc://c"])
    check.question({"ipc://a", "ipc://b", "ipc://d"})
    check.hear(TABLE)
    assert check.gone({"ipc://a", "ipc://b", "ipc://e"}) == {"ipc://b"}
    assert check.gone({"ipc://b"}) == set()


def test_a_controller_that_recovers_says_of_no_server_that_it_is_gone_and_is_asked_again() -> None:
    now = 0.0
    check = LivenessCheck(["ipc://c"], lambda: now)
    silent = {"ipc://b"}
    check.question(silent)
    check.hear(Reply(Table([], {}, [], recovering=True)))
    assert check.gone(silent) == set()
    now = 1.0
    assert check.question(silent) == QUESTION
    check.hear(TABLE)
    assert check.gone(silent) == {"ipc://b"}


def test_the_controller_and_the_units_are_called_what_they_are() -> None:
    check = LivenessCheck(["ipc://c"])
    assert check.name("ipc://c") == "the controller of the queue"
    assert check.name("ipc://a") == "the storage unit of the queue"
