"""A client asks the controller about servers that are silent, and gives up those that it does not name."""

from types import SimpleNamespace
from typing import Any

from tailrace.errors import PeerLost
from tailrace.transfer.queue.messages import Look, Unit, Welcome
from tailrace.transfer.wire.calls import Call
from tailrace.transfer.wire.doubts import Doubts
from tailrace.transfer.wire.frames import Reply

WELCOME = Reply(Welcome(1, [Unit(1, ["ipc://a", "tcp://a"], "host", "")]))


def connections(**doubts: bool) -> dict[str, Any]:
    return {f"ipc://{name}": SimpleNamespace(in_doubt=doubt) for name, doubt in doubts.items()}


def test_nothing_is_asked_without_doubt_or_about_the_controller_itself_or_without_one() -> None:
    assert Doubts("ipc://c").question(connections(a=False, b=False, c=True)) is None
    assert Doubts(None).question(connections(a=True)) is None


def test_one_question_is_asked_at_a_time_and_the_next_one_a_moment_later() -> None:
    now = 0.0
    doubts = Doubts("ipc://c", lambda: now)
    silent = connections(a=True)
    assert doubts.question(silent) == Call("ipc://c", Look())
    assert doubts.question(silent) is None
    doubts.take(PeerLost("silent, too"))
    assert doubts.gone(silent) == []
    assert doubts.question(silent) is None
    now = 1.0
    assert doubts.question(silent) == Call("ipc://c", Look())


def test_a_server_is_gone_that_was_asked_about_and_is_no_unit_and_still_silent() -> None:
    doubts = Doubts("ipc://c")
    doubts.question(connections(a=True, b=True, d=True, e=False))
    doubts.take(WELCOME)
    assert doubts.gone(connections(a=True, b=True, d=False, e=True)) == ["ipc://b"]
    assert doubts.gone(connections(b=True)) == []


def test_a_controller_that_recovers_says_of_no_server_that_it_is_gone_and_is_asked_again() -> None:
    now = 0.0
    doubts = Doubts("ipc://c", lambda: now)
    silent = connections(b=True)
    doubts.question(silent)
    doubts.take(Reply(Welcome(2, recovering=True)))
    assert doubts.gone(silent) == []
    now = 1.0
    assert doubts.question(silent) == Call("ipc://c", Look())
    doubts.take(WELCOME)
    assert doubts.gone(silent) == ["ipc://b"]
