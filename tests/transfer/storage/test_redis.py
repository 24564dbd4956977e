import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

redis = pytest.importorskip("redis", reason="the package redis is not installed")

from tailrace.errors import QueueError, StaleRowError, StorageFull  # noqa: E402
from tailrace.transfer.queue.storage.base import PartId  # noqa: E402
from tailrace.transfer.queue.storage.redis import RedisStorage  # noqa: E402
from tests.transfer.storage.machine import MAX_BYTES, DurableMachine, run_machine  # noqa: E402
from tests.transfer.storage.writing import found, lengths_of, store  # noqa: E402

A, B, C = PartId(0, 0, 0), PartId(1, 2, 3), PartId(2, 0, 0)


@pytest.fixture
def client(redis_url: str) -> Iterator[Any]:
    """A client of the emptied server."""
    made = redis.Redis.from_url(redis_url)
    made.flushall()
    yield made
    made.close()


def storage_at(url: str, name: str = "queue", *, timeout_s: float = 10) -> RedisStorage:
    return RedisStorage(url=url, name=name, timeout_s=timeout_s, max_bytes=MAX_BYTES)


def write(storage: RedisStorage, part: PartId, content: bytes) -> None:
    store(storage, [(part, content)])


def test_units_that_come_and_go_change_nothing(redis_url: str, client: Any) -> None:
    run_machine(lambda: DurableMachine(lambda name: storage_at(redis_url, name)))


def test_parts_survive_the_unit(redis_url: str, client: Any) -> None:
    first = storage_at(redis_url)
    write(first, A, b"cells")
    write(first, B, b"outputs")
    first.drop([A])
    first.close()
    second = storage_at(redis_url)
    assert list(second.parts()) == [B]
    assert bytes(second.read(B)) == b"outputs"
    assert second.nbytes == len(b"outputs")
    assert found(second) == {B: (7, lengths_of(7))}
    second.close()


def test_every_key_begins_with_the_name_and_a_drop_leaves_none(redis_url: str, client: Any) -> None:
    storage, other = storage_at(redis_url, "one"), storage_at(redis_url, "other")
    write(storage, B, b"cells")
    assert sorted(client.keys()) == [b"one:1:2:3", b"one:parts"]
    assert list(other.parts()) == []
    storage.drop([B])
    assert client.keys() == []
    storage.close()
    other.close()


def test_a_part_that_the_server_lost_is_gone(redis_url: str, client: Any) -> None:
    storage = storage_at(redis_url)
    write(storage, B, b"cells")
    client.delete("queue:1:2:3")
    with pytest.raises(StaleRowError):
        storage.read(B)
    assert B not in storage
    assert client.keys() == []
    storage.close()


def test_a_storage_whose_server_was_emptied_has_what_was_written_since(redis_url: str, client: Any) -> None:
    storage = storage_at(redis_url)
    for part in (A, B):
        write(storage, part, b"cells")
    client.flushall()
    write(storage, C, b"new")
    with pytest.raises(StaleRowError, match=r"slot=0, generation=0, tag=0\) is not stored"):
        storage.read(A)
    assert list(storage.parts()) == [C]
    assert storage.nbytes == len(b"new")
    assert bytes(storage.read(C)) == b"new"
    write(storage, B, b"again")
    assert bytes(storage.read(B)) == b"again"
    storage.close()


@pytest.mark.parametrize(
    ("field", "record"),
    [
        ("x", [1, ["text"], [1]]),
        ("1:2", [1, ["text"], [1]]),
        ("1:2:3", "many"),
        ("1:2:3", [-1, ["text"], [1]]),
        ("1:2:3", [1, ["text"], [2**63]]),
        ("1:2:3", [1, ["text"], [1, 1]]),
    ],
)
def test_foreign_data_under_the_name_is_refused(redis_url: str, client: Any, field: str, record: object) -> None:
    client.hset("queue:parts", field, msgspec.msgpack.encode(record))
    with pytest.raises(QueueError, match=r"'queue:parts' in Redis at .* does not say what cells parts have"):
        storage_at(redis_url)


def test_parts_that_do_not_say_what_cells_they_have_are_refused_and_left(redis_url: str, client: Any) -> None:
    client.hset("queue:sizes", "1:2:3", 5)
    client.set("queue:1:2:3", b"cells")
    with pytest.raises(QueueError, match=r"parts of 'queue' that an older Tailrace stored.* delete the keys 'queue:"):
        storage_at(redis_url)
    assert client.dbsize() == 2


def test_a_key_of_another_type_is_refused(redis_url: str, client: Any) -> None:
    client.set("queue:parts", "text")
    with pytest.raises(QueueError, match="WRONGTYPE"):
        storage_at(redis_url)


def test_a_server_without_room_is_full_and_the_write_can_come_again(redis_url: str, client: Any) -> None:
    storage = storage_at(redis_url)
    client.config_set("maxmemory", 1)
    try:
        with pytest.raises(StorageFull, match=r"Redis at .* has no room"):
            write(storage, A, b"cells")
    finally:
        client.config_set("maxmemory", 0)
    assert list(storage.parts()) == []
    write(storage, A, b"cells")
    assert bytes(storage.read(A)) == b"cells"
    storage.close()


def test_a_server_that_is_not_there_is_an_error_that_names_its_address(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(QueueError, match=f"Redis at 127.0.0.1:{port} failed: .*refused"):
        storage_at(f"redis://:secret@127.0.0.1:{port}/0")
    with pytest.raises(QueueError, match=f"Redis at {tmp_path}/none failed: "):
        storage_at(f"unix://{tmp_path}/none")


def test_a_server_that_never_answers_is_an_error_that_names_its_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(QueueError, match=rf"Redis at 127.0.0.1:{port} failed: (?i:.*time.?out)"):
            storage_at(f"redis://127.0.0.1:{port}/0", timeout_s=0.05)


def test_an_address_that_is_none_is_refused() -> None:
    with pytest.raises(QueueError, match=r"queue.storage.url is no address of a Redis server: .*scheme"):
        storage_at("http://127.0.0.1")
