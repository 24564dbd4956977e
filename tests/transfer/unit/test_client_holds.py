"""Shared memory: places and pins belong to clients, and go back in the end."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tailrace.errors import QueueError, StaleRowError, StorageFull
from tailrace.transfer.queue.base import RowId
from tailrace.transfer.queue.messages import QUEUE, Cells, Done, Reserve, Reserved, Settle, Write, pack
from tailrace.transfer.queue.storage.arena import ArenaStorage
from tailrace.transfer.queue.storage.base import PartId
from tailrace.transfer.queue.unit.client_holds import ClientHolds
from tailrace.transfer.queue.unit.service import StorageUnit
from tailrace.transfer.wire.messages import Accepted, Beat, Cancel
from tailrace.transfer.wire.server import Server
from tailrace.types import Value
from tests.helpers.waiting import until
from tests.transfer.storage.writing import store
from tests.transfer.unit.conftest import MAX_BYTES, SILENCE_S, Running, running
from tests.transfer.unit.controller import Client, cells_in, described, read
from tests.transfer.wire.desk import TOKEN
from tests.transfer.wire.test_server import Peer

A = RowId(0, 0)
PART = PartId(*A, 0)
LARGE: dict[str, Value] = {"ids": np.arange(MAX_BYTES // 16)}
LARGE_BYTES = MAX_BYTES // 2


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[ArenaStorage]:
    """An arena with one part."""
    made = ArenaStorage(parent=tmp_path, max_bytes=1000)
    store(made, [(PART, bytes(80))])
    yield made
    made.close()


@pytest.fixture
def peer(arena: Running) -> Iterator[Peer]:
    made = Peer(arena.endpoint)
    made.enter()
    yield made
    made.close()


def test_cells_in_shared_memory_stay_until_the_last_reader_is_done(arena: Running, client: Client) -> None:
    client.write({A: LARGE})
    first, second = (client.ask(read([A], ["ids"], shared=True)) for _ in range(2))
    client.ask(Settle(b"", pack([A])))
    for pin in (first.pin, second.pin):
        with pytest.raises(StorageFull):
            client.ask(Reserve(MAX_BYTES - 8))
        assert client.ask(Done([pin], [])) == Accepted()
    assert isinstance(client.ask(Reserve(MAX_BYTES - 8)), Reserved)


def test_shared_cells_are_found_in_several_segments_and_in_none(tmp_path: Path) -> None:
    rows: dict[RowId, dict[str, Value]] = {
        RowId(slot, 0): {"ids": np.arange(size) + slot} for slot, size in enumerate([10_000, 0, 10_000, 5])
    }
    storage = ArenaStorage(parent=tmp_path, max_bytes=MAX_BYTES, segment_bytes=80_000)
    with running(storage) as unit, Client(unit.endpoint) as client:
        for row, cells in rows.items():
            client.write({row: cells})
        answer = client.ask(read(list(rows), ["ids"], shared=True))
        assert len(answer.segments) == 3
        memories = [(storage.directory / name).read_bytes() for name in answer.segments]
        got = cells_in(answer, ["ids"], memories)
    for found, cells in zip(got, rows.values(), strict=True):
        assert np.array_equal(found["ids"], cells["ids"])  # type: ignore[arg-type]


def test_few_bytes_are_sent_rather_than_shared(arena: Running, client: Client) -> None:
    client.write({A: LARGE | {"number": 1}})
    assert client.ask(read([A], ["number"], shared=True)).pin is None
    assert client.ask(read([A], ["ids"], shared=True)).pin is not None


def test_a_place_is_its_clients_alone(arena: Running, client: Client) -> None:
    runs, memory = described({A: LARGE})
    place = client.ask(Reserve(len(memory))).place
    with Client(arena.endpoint) as other:
        with pytest.raises(QueueError, match=f"place {place} is not reserved by 'client-"):
            other.ask(Write(0, pack([A]), runs, place))
        assert other.ask(Done([], [place])) == Accepted()
    client.ask(Write(0, pack([A]), runs, place))
    with pytest.raises(QueueError, match="written, given back or taken back"):
        client.ask(Write(0, pack([A]), runs, place))


def test_a_write_that_is_refused_leaves_the_place_to_its_client(arena: Running, client: Client) -> None:
    runs, memory = described({A: LARGE})
    place = client.ask(Reserve(len(memory))).place
    client.ask(Settle(b"", pack([A])))
    with pytest.raises(StaleRowError):
        client.ask(Write(0, pack([A]), runs, place))
    client.ask(Done([], [place]))
    assert arena.storage.nbytes == 0


def test_a_reserve_that_is_cancelled_is_undone(arena: Running, peer: Peer) -> None:
    assert isinstance(peer.ask(3, Reserve(1000)), Reserved)
    assert arena.storage.nbytes == 1000
    assert peer.ask(4, Cancel(3)) == Accepted()
    assert arena.storage.nbytes == 0


def test_a_read_that_is_repeated_pins_once_and_is_undone_when_it_is_cancelled(
    arena: Running, client: Client, peer: Peer
) -> None:
    client.write({A: LARGE})
    answers = [peer.ask(3, read([A], ["ids"], shared=True)) for _ in range(2)]
    assert isinstance(answers[0], Cells)
    assert answers[0] == answers[1]
    client.ask(Settle(b"", pack([A])))
    assert arena.storage.nbytes > 0
    assert peer.ask(4, Cancel(3)) == Accepted()
    assert arena.storage.nbytes == 0


@pytest.mark.parametrize(("passed_s", "kept"), [(29.0, 1000 + LARGE_BYTES), (31.0, 1000), (SILENCE_S + 1, 1000)])
def test_a_silent_client_loses_its_pins_when_it_promised_and_keeps_its_places_while_it_is_connected(
    tmp_path: Path, passed_s: float, kept: int
) -> None:
    now = [0.0]
    storage = ArenaStorage(parent=tmp_path, max_bytes=MAX_BYTES)
    with running(storage, lambda: now[0]) as unit, Client(unit.endpoint) as silent, Client(unit.endpoint) as other:
        silent.write({A: LARGE})
        assert silent.ask(Beat(30.0)) == Accepted()
        assert silent.ask(read([A], ["ids"], shared=True)).pin is not None
        silent.ask(Reserve(1000))
        now[0] = passed_s
        for _ in range(100):  # each request is handled after the wake-ups of those before it
            other.ask(Settle(b"", pack([A])))
            if storage.nbytes == kept:
                break
        assert storage.nbytes == kept


def test_what_a_client_holds_goes_back_when_it_is_dead_and_not_when_it_only_is_silent(tmp_path: Path) -> None:
    now = [0.0]
    storage = ArenaStorage(parent=tmp_path, max_bytes=MAX_BYTES)
    with running(storage, lambda: now[0]) as unit, Client(unit.endpoint) as other:
        with Client(unit.endpoint) as silent:
            silent.write({A: LARGE})
            assert silent.ask(read([A], ["ids"], shared=True)).pin is not None
            silent.ask(Reserve(1000))
            other.ask(Settle(b"", pack([A])))
            now[0] += SILENCE_S + 1
            for _ in range(10):
                other.ask(Settle(b"", pack([])))
            assert storage.nbytes == 1000 + LARGE_BYTES

        def is_free() -> bool:
            now[0] += SILENCE_S + 1
            other.ask(Settle(b"", pack([])))
            return not storage.nbytes

        until(is_free)  # holds once ZeroMQ has noticed the end of the client's connection


def test_memory_that_nobody_uses_for_a_minute_goes_back(tmp_path: Path, storage: ArenaStorage) -> None:
    server = Server("unit", TOKEN, QUEUE, clock=lambda: 0.0)
    unit = StorageUnit(server, storage, name="unit", controller=f"ipc://{tmp_path}/none", max_bytes=1000)
    storage.drop([PART])
    kept = []
    for now in (59.0, 60.0, 119.0, 120.0):
        unit.tick(now)
        kept.append(len(list(storage.directory.iterdir())))
    assert unit.next_deadline == 121.0, "the next sign of life"
    server.stop()
    server.run(unit)
    assert kept == [1, 1, 1, 0]


def test_a_client_that_breaks_its_promise_loses_its_pins_and_keeps_its_places(storage: ArenaStorage) -> None:
    holds = ClientHolds(storage)
    holds.reserve("late", 8)
    holds.beat("late", 30.0, now=0.0)
    holds.pin("late", [PART], now=20.0)
    assert holds.next_deadline == 50.0
    storage.drop([PART])
    holds.silent(now=49.0)
    assert storage.nbytes == 88
    holds.silent(now=50.0)
    assert storage.nbytes == 8
    assert holds.next_deadline is None


def test_a_client_that_promises_nothing_keeps_its_pins(storage: ArenaStorage) -> None:
    holds = ClientHolds(storage)
    holds.pin("quiet", [PART], now=0.0)
    storage.drop([PART])
    holds.silent(now=1e9)
    assert storage.nbytes == 80


def test_a_client_that_is_forgotten_gives_everything_back_and_others_nothing(storage: ArenaStorage) -> None:
    holds = ClientHolds(storage)
    for client in ("gone", "other"):
        holds.reserve(client, 100)
        holds.pin(client, [PART], now=0.0)
    storage.drop([PART])
    holds.forget("gone")
    holds.forget("gone")
    assert storage.nbytes == 180
    holds.forget("other")
    assert storage.nbytes == 0


def test_what_a_client_does_not_hold_is_passed_over(storage: ArenaStorage) -> None:
    holds = ClientHolds(storage)
    pin, _ = holds.pin("one", [PART], now=0.0)
    place = holds.reserve("one", 8)
    holds.done("other", [pin, 99], [place.serial, 99])
    holds.done("one", [pin, pin, 99], [place.serial, place.serial, 99])
    holds.done("one", [pin], [place.serial])
    storage.drop([PART])
    assert storage.nbytes == 0
