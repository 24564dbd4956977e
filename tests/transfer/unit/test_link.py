"""The reports of a unit to the controller, and its behaviour while the controller is not there."""

import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from tailrace.errors import PeerLost, QueueError, StaleRowError, WireError
from tailrace.transfer.queue.base import RowId
from tailrace.transfer.queue.messages import QUEUE, Join, Run, Write, pack
from tailrace.transfer.queue.storage.arena import ArenaStorage
from tailrace.transfer.queue.storage.memory import MemoryStorage
from tailrace.transfer.queue.unit.service import StorageUnit
from tailrace.transfer.wire.frames import encode
from tailrace.transfer.wire.messages import Accepted, Beat, Cancel
from tailrace.transfer.wire.server import Server
from tailrace.transfer.wire.sockets import host_id
from tests.helpers.waiting import until
from tests.transfer.unit.conftest import Running
from tests.transfer.unit.controller import UNIT, Client, Recorder
from tests.transfer.wire.desk import LIMIT_S, TOKEN, serving
from tests.transfer.wire.rows import packed
from tests.transfer.wire.test_server import Peer

A, B = RowId(0, 0), RowId(1, 0)
EVERY_S = 0.02


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    """The endpoint of a controller that may come and go."""
    return f"ipc://{tmp_path}/controller"


def make_unit(server: Server, controller: str) -> StorageUnit:
    storage = MemoryStorage(max_bytes=1000)
    return StorageUnit(server, storage, name="a", controller=controller, max_bytes=1000, join_every_s=EVERY_S)


def test_a_unit_offers_itself_again_and_again(endpoint: str) -> None:
    unit, recorder = Server("unit", TOKEN, QUEUE), Recorder()
    with (
        serving(Server("controller", TOKEN, QUEUE, endpoints=[endpoint]), recorder),
        serving(unit, make_unit(unit, endpoint)),
    ):
        recorder.wait_for(lambda: len(recorder.joins) >= 3)
    first, *others = recorder.joins
    assert first == Join(
        name="a",
        incarnation=first.incarnation,
        lasting=False,
        endpoints=unit.own_endpoints,
        host=host_id(),
        directory="",
        max_bytes=1000,
    )
    assert all(other == first for other in others)


def test_an_arena_names_its_directory(arena: Running) -> None:
    assert isinstance(arena.storage, ArenaStorage)
    assert arena.controller.joins[0].directory == str(arena.storage.directory)


def test_a_unit_started_anew_is_another_incarnation(endpoint: str) -> None:
    recorder = Recorder()
    with serving(Server("controller", TOKEN, QUEUE, endpoints=[endpoint]), recorder):
        for lives in (1, 2):
            unit = Server("unit", TOKEN, QUEUE)
            with serving(unit, make_unit(unit, endpoint)):
                recorder.wait_for(lambda lives=lives: len({join.incarnation for join in recorder.joins}) == lives)  # type: ignore[misc]


def test_requests_that_need_the_columns_wait_for_them(endpoint: str) -> None:
    unit, recorder = Server("unit", TOKEN, QUEUE), Recorder()
    read: list[object] = []

    def write_and_read() -> None:
        with Client(unit.endpoints[0]) as client:
            client.write({A: {"number": 1}})
            read.extend(client.read([A], ["number"]))

    with serving(unit, make_unit(unit, endpoint)):
        thread = threading.Thread(target=write_and_read)
        thread.start()
        with serving(Server("controller", TOKEN, QUEUE, endpoints=[endpoint]), recorder):
            thread.join(LIMIT_S)
            recorder.wait_for(lambda: recorder.written == [(UNIT, [A])])
    assert read == [{"number": 1}]


@pytest.mark.parametrize("forget", ["cancel", "gone"])
def test_a_write_that_waits_for_the_columns_ends_with_its_sender(endpoint: str, forget: str) -> None:
    unit, recorder = Server("unit", TOKEN, QUEUE), Recorder()
    service = make_unit(unit, endpoint)
    write = Write(0, pack([A]), [Run(1, ["number"], packed([[1]]))], None)
    with serving(unit, service), closing(Peer(unit.endpoints[0])) as peer:
        peer.enter()
        peer.send(*encode(3, 0, write, [bytes(8)]))  # type: ignore[arg-type]
        if forget == "cancel":
            assert peer.ask(4, Cancel(3)) == Accepted()
        else:
            assert peer.ask(4, Beat(30.0)) == Accepted()
            service.gone(peer.identity.unique)
        with serving(Server("controller", TOKEN, QUEUE, endpoints=[endpoint]), recorder):
            recorder.wait_for(lambda: len(recorder.joins) >= 2)
            with Client(unit.endpoints[0]) as client, pytest.raises(StaleRowError):
                client.read([A], ["number"])
    assert recorder.written == []


def test_a_write_is_answered_when_a_controller_knows_of_it_be_it_one_that_was_started_anew(endpoint: str) -> None:
    unit, old, new = Server("unit", TOKEN, QUEUE), Recorder(), Recorder(unit=UNIT + 1)
    with serving(unit, make_unit(unit, endpoint)), Client(unit.endpoints[0]) as client:
        with serving(Server("controller", TOKEN, QUEUE, endpoints=[endpoint]), old):
            client.write({A: {"number": 1}})
            assert old.written == [(UNIT, [A])]
        thread = threading.Thread(target=client.write, args=({B: {"number": 1}},))
        thread.start()
        with serving(Server("controller", TOKEN, QUEUE, endpoints=[endpoint]), new):
            thread.join(LIMIT_S)
            assert [rows for _, rows in new.written] == [[B]]


def test_a_write_that_the_controller_does_not_want_any_more_is_refused(endpoint: str) -> None:
    unit, recorder = Server("unit", TOKEN, QUEUE), Recorder()
    recorder.failures = [StaleRowError("too late")]
    with (
        serving(Server("controller", TOKEN, QUEUE, endpoints=[endpoint]), recorder),
        serving(unit, make_unit(unit, endpoint)),
        Client(unit.endpoints[0]) as client,
    ):
        with pytest.raises(StaleRowError, match="too late"):
            client.write({A: {"number": 1}})
        client.write({B: {"number": 1}})
    assert recorder.written == [(UNIT, [B])]


@pytest.mark.parametrize(
    ("controller", "message"),
    [
        (
            lambda: (Server("controller", TOKEN, QUEUE), Recorder(refusal=QueueError("two units are named 'a'"))),
            "two units",
        ),
        (lambda: (Server("controller", b"another token, as long", QUEUE), Recorder()), "token"),
    ],
)
def test_a_unit_that_the_controller_refuses_ends_with_its_error(
    controller: Callable[[], tuple[Server, Recorder]], message: str
) -> None:
    server, recorder = controller()
    unit = Server("unit", TOKEN, QUEUE)
    with serving(server, recorder), pytest.raises((QueueError, WireError), match=message):
        unit.run(make_unit(unit, server.endpoints[0]))


def test_a_unit_that_is_told_to_leave_says_so_and_ends_when_it_has_left(endpoint: str) -> None:
    unit, recorder = Server("unit", TOKEN, QUEUE), Recorder()
    service = make_unit(unit, endpoint)
    with serving(Server("controller", TOKEN, QUEUE, endpoints=[endpoint]), recorder), serving(unit, service):
        recorder.wait_for(lambda: bool(recorder.joins))
        assert not recorder.joins[0].leaving
        recorder.leaving = True
        recorder.wait_for(lambda: recorder.joins[-1].leaving)
        recorder.left = True
        until(lambda: service.has_left)
    assert unit.stopped_by == "it has left the queue, and its rows are on other units"


def test_a_unit_whose_queue_does_not_answer_any_more_ends(endpoint: str) -> None:
    unit = Server("unit", TOKEN, QUEUE)
    storage = MemoryStorage(max_bytes=1000)
    service = StorageUnit(
        unit, storage, name="a", controller=endpoint, max_bytes=1000, join_every_s=EVERY_S, patience_s=EVERY_S
    )
    with pytest.raises(PeerLost, match=r"the queue has not answered for 0\.02 s: it has ended"):
        unit.run(service)
