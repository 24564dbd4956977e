"""The answers of a unit over real sockets, on a storage of every kind."""

from collections.abc import Callable

import numpy as np
import pytest

from tailrace.errors import ColumnError, QueueError, StaleRowError, StorageFull, WireError
from tailrace.transfer.queue.base import RowId
from tailrace.transfer.queue.messages import Admit, Inventory, Parts, Read, Reserve, Run, Settle, Write, pack, unpack
from tailrace.transfer.queue.storage.base import PartId, Storage
from tailrace.transfer.queue.storage.keyed import KeyedStorage
from tailrace.transfer.queue.unit import service
from tailrace.transfer.wire.messages import Accepted
from tailrace.types import Value
from tests.transfer.storage.keyed import DictOfBytes
from tests.transfer.unit.conftest import MAX_BYTES, Running, running
from tests.transfer.unit.controller import UNIT, Client, read
from tests.transfer.unit.machine import run_machine
from tests.transfer.wire.rows import packed

A, B, C, D = RowId(0, 0), RowId(1, 0), RowId(2, 5), RowId(3, 0)
IDS = np.arange(5)


def one(row: RowId = A, *, columns: tuple[str, ...] = ("number",), length: int = 1, rows: int = 1) -> Write:
    """A write of one row of 8 bytes, correct by default."""
    return Write(0, pack([row]), [Run(rows, list(columns), packed([[length]]))], None)


def test_cells_are_as_they_were_written_until_they_are_settled(make: Callable[[], Storage]) -> None:
    run_machine(lambda: running(make()))


def test_a_row_is_read_in_any_columns_from_parts_of_several_writes(unit: Running, client: Client) -> None:
    client.write({A: {"ids": IDS, "text": "a"}, B: {"text": "b", "ids": IDS[:2]}})
    client.write({A: {"number": 1}}, tag=7)
    client.write({B: {"number": 2}}, tag=8)
    first, second = client.read([B, A], ["number", "text"], [[8, 0], [7, 0]])
    assert (first, second) == ({"number": 2, "text": "b"}, {"number": 1, "text": "a"})
    [cells] = client.read([A], ["ids"])
    assert isinstance(cells["ids"], np.ndarray)
    assert cells["ids"].tolist() == IDS.tolist()


def test_the_controller_hears_of_new_rows_and_not_of_outputs(unit: Running, client: Client) -> None:
    client.write({A: {"number": 1}}, tag=7)
    client.write({B: {"number": 1}, C: {"number": 1}})
    unit.controller.wait_for(lambda: bool(unit.controller.written))
    assert unit.controller.written == [(UNIT, [B, C])]


def test_a_part_that_is_not_there_is_named(unit: Running, client: Client) -> None:
    client.write({A: {"number": 1}})
    with pytest.raises(StaleRowError, match=r"PartId\(slot=0, generation=0, tag=7\) is not stored"):
        client.read([A], ["number"], 7)
    with pytest.raises(ColumnError, match=r"tag=0\) has no cell in column 'ids'; it has \['number'\]"):
        client.read([A], ["ids"])


def test_a_row_that_has_left_is_not_written_again_but_its_slot_is(unit: Running, client: Client) -> None:
    client.write({RowId(0, 1): {"number": 1}})
    assert client.ask(Settle(b"", packed([[0, 0], [1, 3]]))) == Accepted()
    for late in (RowId(0, 0), RowId(1, 3), RowId(1, 2)):
        with pytest.raises(StaleRowError, match=rf"{late.slot}, generation={late.generation}\) cannot be written"):
            client.write({RowId(5, 5): {"number": 2}, late: {"number": 2}})
    client.write({RowId(1, 4): {"number": 4}})
    assert client.read([RowId(0, 1), RowId(1, 4)], ["number"]) == [{"number": 1}, {"number": 4}]


def test_a_part_is_written_once(unit: Running, client: Client) -> None:
    client.write({A: {"number": 1}})
    client.write({A: {"number": 1}, B: {"number": 2}})
    with pytest.raises(QueueError, match="stored already with other bytes"):
        client.write({C: {"number": 3}, A: {"number": 2}})
    with pytest.raises(StaleRowError):
        client.read([C], ["number"])
    assert client.read([A, B], ["number"]) == [{"number": 1}, {"number": 2}]


def test_a_full_unit_says_so_takes_nothing_in_and_has_room_when_rows_leave(unit: Running, client: Client) -> None:
    large = {"ids": np.zeros(MAX_BYTES // 16, np.int64)}
    client.write({A: large})
    with pytest.raises(StorageFull, match="no room"):
        client.write({B: {"number": 1}, C: large})
    with pytest.raises(StaleRowError):
        client.read([B], ["number"])
    client.ask(Settle(b"", pack([A])))
    client.write({B: {"number": 1}, C: large})
    assert client.read([B], ["number"]) == [{"number": 1}]


@pytest.mark.parametrize("make", ["memory"], indirect=True)
def test_parts_that_the_storage_failed_to_drop_go_with_the_next_ones(
    unit: Running, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(parts: object) -> None:
        raise QueueError("the server is not there")

    client.write({A: {"number": 1}, B: {"number": 2}})
    with monkeypatch.context() as patch:
        patch.setattr(unit.storage, "drop", fail)
        with pytest.raises(QueueError, match="not there"):
            client.ask(Settle(b"", pack([A])))
    with pytest.raises(StaleRowError):
        client.read([A], ["number"])
    client.ask(Settle(b"", pack([B])))
    assert unit.storage.nbytes == 0


@pytest.mark.parametrize(
    ("message", "frames", "error", "text"),
    [
        (one(), [bytes(16)], QueueError, "1 parts of 8 bytes in all came in 16 bytes"),
        (one(), [], WireError, "1 runs came with 0 frames"),
        (one(length=2), [bytes(16)], ColumnError, "'number': got a cell of length 2, expected 1"),
        (one(columns=("ids",), length=-1), [b""], ColumnError, "'ids': got a cell of length -1, expected 0 to"),
        (one(columns=("ids",), length=2**62), [b""], ColumnError, "got a cell of length 4611686018427387904"),
        (one(columns=("height",)), [bytes(8)], ColumnError, "unknown column 'height'"),
        (one(columns=("number", "number")), [bytes(8)], WireError, "are not the lengths of 1 rows in 2 columns"),
        (one(rows=2), [bytes(8)], WireError, "1 rows came with runs of 2"),
        (Write(-1, pack([A]), [Run(1, ["number"], packed([[1]]))], None), [bytes(8)], WireError, "Expected `int` >= 0"),
        (Write(0, b"123", [], None), [], WireError, "3 bytes are not rows of 2 int64"),
        (Write(0, b"", [], 1), [], QueueError, "place 1 is not reserved by"),
        (Read(pack([A]), ["number"], b"", False), [], WireError, "a read of 1 rows"),
        (Admit(b"", b"", [], 0, 0.0), [], WireError, "Admit is not for this server"),
    ],
)
def test_what_does_not_fit_together_is_refused_and_changes_nothing(
    unit: Running, client: Client, message: Write, frames: list[bytes], error: type[QueueError], text: str
) -> None:
    with pytest.raises(error, match=text):
        client.ask(message, frames)
    assert client.ask(Inventory()) == Parts(b"")
    client.write({A: {"number": 1}})


def test_cells_that_are_too_long_for_one_frame_come_in_several(
    unit: Running, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "PIECE_BYTES", 40)
    client.write({A: {"ids": IDS}, B: {"ids": IDS[:2]}, C: {"ids": IDS[:3]}})
    reply = client.call(read([A, B, C], ["ids"]))
    assert [len(frame) for frame in reply.frames] == [40, 40]
    assert [len(cells["ids"]) for cells in client.read([A, B, C], ["ids"])] == [5, 2, 3]  # type: ignore[arg-type]


@pytest.mark.parametrize("make", ["memory", "spill"], indirect=True)
def test_a_storage_that_is_not_shared_reserves_no_memory(unit: Running, client: Client) -> None:
    with pytest.raises(QueueError, match="no memory to share; write frames"):
        client.ask(Reserve(8))


@pytest.mark.parametrize("make", ["redis"], indirect=True)
def test_a_unit_started_anew_has_the_parts_of_its_last_life(make: Callable[[], Storage]) -> None:
    rows: dict[RowId, dict[str, Value]] = {A: {"ids": IDS, "text": "a"}, B: {"text": "ü", "ids": IDS[:2]}}
    with running(make()) as first, Client(first.endpoint) as client:
        assert first.controller.joins[0].lasting
        client.write(rows)
        client.write({C: {"number": 1}}, tag=7)
        client.write({D: {"number": 1}})
    with running(make()) as second, Client(second.endpoint) as client:
        client.ask(Settle(packed([[*D, 0]]), b""))
        found = unpack(client.ask(Inventory()).parts, 3).tolist()
        assert sorted(found) == [[*A, 0], [*B, 0], [*C, 7]]
        assert [cells["text"] for cells in client.read([A, B], ["text"])] == ["a", "ü"]
        assert [cells["ids"].tolist() for cells in client.read([A, B], ["ids"])] == [[0, 1, 2, 3, 4], [0, 1]]  # type: ignore[union-attr]
        with pytest.raises(ColumnError, match=r"tag=7\) has no cell in column 'text'; it has \['number'\]"):
            client.read([C], ["text"], 7)
        with pytest.raises(StaleRowError, match=r"slot=2, generation=5, tag=8"):
            client.read([C], ["number"], 8)
        client.write({C: {"number": 1}}, tag=7)  # a client without an answer from the first unit asks the second
        assert client.read([C], ["number"], 7) == [{"number": 1}]
        client.ask(Settle(packed([PartId(*C, 7)]), pack([A, B])))
        assert client.ask(Inventory()) == Parts(b"")


@pytest.mark.parametrize("make", ["redis"], indirect=True)
def test_a_unit_whose_storage_has_lost_parts_joins_anew_with_those_that_are_left(
    unit: Running, client: Client, redis_url: str
) -> None:
    from redis import Redis

    client.write({A: {"ids": IDS}, B: {"number": 1}})
    with Redis.from_url(redis_url) as server:
        server.flushall()
    client.write({C: {"number": 3}})
    first = unit.controller.joins[-1]
    with pytest.raises(StaleRowError, match=r"slot=1.* is not stored"):
        client.read([C, B], ["number"])
    unit.controller.wait_for(lambda: unit.controller.joins[-1].incarnation != first.incarnation)
    assert unit.controller.joins[-1].name == first.name
    assert client.ask(Inventory()) == Parts(packed([PartId(*C, 0)]))
    assert client.read([C], ["number"]) == [{"number": 3}]
    with pytest.raises(StaleRowError):
        client.read([A], ["ids"])
    client.write({A: {"ids": IDS}})  # the controller is told of it after all earlier Joins
    assert len({join.incarnation for join in unit.controller.joins}) == 2, "it has taken stock of all at once"
    [cells] = client.read([A], ["ids"])
    assert cells.keys() == {"ids"}


def test_a_unit_whose_store_of_keys_has_lost_a_part_goes_on_with_the_others() -> None:
    kept = DictOfBytes()
    with (
        running(KeyedStorage(kept, name="queue", max_bytes=MAX_BYTES)) as unit,
        Client(unit.endpoint) as client,
    ):
        client.write({A: {"ids": IDS}, B: {"number": 1}})
        first = unit.controller.joins[-1]
        assert not first.lasting
        kept.remove([f"queue:{A.slot}:{A.generation}:0"])
        with pytest.raises(StaleRowError):
            client.read([A], ["ids"])
        unit.controller.wait_for(lambda: unit.controller.joins[-1].incarnation != first.incarnation)
        assert unit.controller.joins[-1].lasting, "so that the controller asks what is left"
        assert client.ask(Inventory()) == Parts(packed([PartId(*B, 0)]))
        assert client.read([B], ["number"]) == [{"number": 1}]


@pytest.mark.parametrize("make", ["redis"], indirect=True)
def test_a_unit_that_takes_stock_does_not_come_back_to_what_was_settled(
    unit: Running, client: Client, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from redis import Redis

    def fail(parts: object) -> None:
        raise QueueError("the server is not there")

    with Redis.from_url(redis_url) as server:
        server.flushall()
        client.write({A: {"number": 1}, B: {"number": 2}})
        with monkeypatch.context() as patch:
            patch.setattr(unit.storage, "drop", fail)
            with pytest.raises(QueueError, match="not there"):
                client.ask(Settle(b"", pack([A])))
        [key] = server.keys("*:1:0:0")
        server.delete(key)
    with pytest.raises(StaleRowError):
        client.read([B], ["number"])
    assert client.ask(Inventory()) == Parts(packed([PartId(*A, 0)]))
    client.ask(Settle(b"", b""))
    assert client.ask(Inventory()) == Parts(b"")
