"""A unit copies parts to another unit, on a storage of every kind, and answers when that unit has them."""

import numpy as np
import pytest

from tailrace.errors import StaleRowError, StorageFull, WireError
from tailrace.transfer.queue.base import RowId
from tailrace.transfer.queue.messages import Copy, Settle, Unit, pack
from tailrace.transfer.queue.storage.base import PartId
from tailrace.transfer.queue.storage.memory import MemoryStorage
from tailrace.transfer.wire.messages import Accepted
from tailrace.transfer.wire.sockets import host_id
from tests.transfer.unit.conftest import MAX_BYTES, Running, running
from tests.transfer.unit.controller import Client

A, B, C, D = RowId(0, 0), RowId(1, 0), RowId(2, 5), RowId(3, 0)


def copy(to: Running, *parts: tuple[RowId, int]) -> Copy:
    numbers = np.array([(*row, tag) for row, tag in parts], np.int64).reshape(-1, 3)
    return Copy(pack(numbers), Unit(4, [to.endpoint], host_id(), ""))


def test_parts_of_several_writes_and_columns_are_the_same_on_the_other_unit(unit: Running, client: Client) -> None:
    client.write({A: {"ids": np.arange(5), "text": "a"}, B: {"text": "b", "ids": np.arange(2)}})
    client.write({C: {"number": 9}})
    client.write({A: {"number": 1}}, tag=7)
    with running(MemoryStorage(max_bytes=MAX_BYTES)) as other, Client(other.endpoint) as reader:
        message = copy(other, (A, 0), (A, 7), (B, 0), (C, 0))
        assert client.ask(message) == client.ask(message) == Accepted(), "what is there already is no error"
        first, second = reader.read([A, B], ["text", "ids"])
        assert (first["text"], second["text"]) == ("a", "b")
        assert [len(row["ids"]) for row in (first, second)] == [5, 2]  # type: ignore[arg-type]
        assert reader.read([A, C], ["number"], [[7], [0]]) == [{"number": 1}, {"number": 9}]
        assert not other.controller.written, "the controller knows of it already"


def test_a_copy_that_fails_is_the_error_of_the_unit_that_refused_it(arena: Running, client: Client) -> None:
    client.write({A: {"ids": np.arange(100)}, B: {"number": 1}})
    with running(MemoryStorage(max_bytes=1000)) as other, Client(other.endpoint) as far:
        far.write({C: {"ids": np.arange(100)}})
        with pytest.raises(StorageFull):
            client.ask(copy(other, (A, 0)))
        far.ask(Settle(b"", pack([B])))
        with pytest.raises(StaleRowError, match="has left the queue"):
            client.ask(copy(other, (B, 0)))
        with pytest.raises(StaleRowError, match=r"tag=3\) is not stored"):
            client.ask(copy(other, (B, 3)))
        with pytest.raises(WireError, match="no parts"):
            client.ask(copy(other))
        client.write({D: {"number": 2}})
        assert client.ask(copy(other, (D, 0))) == Accepted(), "an error does no harm"
    assert PartId(*A, 0) in arena.storage
