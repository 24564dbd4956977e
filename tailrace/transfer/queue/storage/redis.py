"""Storage in a Redis server, where parts survive the unit.

    bytes of the caller ──store: one transaction──▶ <name>:<slot>:<generation>:<tag>   the bytes of each part
                                                    <name>:parts                       a hash: the cells of each part

A new unit of the same name finds the parts of the old one and their cells. Only one unit at a time may use a name. So
the unit remembers which parts are stored, and asks the server again only after it reads a part that the server has
lost. Every change may be repeated, so the next try completes a call that failed half-way.

Parts in an older form are refused. It kept only sizes, in a hash <name>:sizes, and does not say which cells a part has.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import msgspec
import numpy as np
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tailrace.errors import QueueError, StorageFull, one_line
from tailrace.transfer.queue.storage.base import PartBatch, PartId
from tailrace.transfer.queue.storage.served import ServedStorage, key_of

_Natural = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class _Record(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The cells of a part, as the server keeps them in msgpack."""

    size: _Natural
    """Bytes of the part."""
    columns: list[str]
    lengths: list[_Natural]
    """The length of the cell in each column, see `Run.lengths`."""


class RedisStorage(ServedStorage):
    """A `Storage` in Redis. A call that needs the server raises QueueError if the server fails."""

    lasting = True

    def __init__(self, *, url: str, name: str, timeout_s: float, max_bytes: int) -> None:
        """Connect, and find the parts that were stored under `name`.

        `url`: such as redis://127.0.0.1:6379/0. `timeout_s`: a call that the server does not answer within this time is
        tried once more, on a new connection. `max_bytes`: the most bytes of all parts together.

        Raises:
            QueueError: the server cannot be reached, or the data stored under `name` is not parts or is in an older
                form.
        """
        super().__init__(max_bytes=max_bytes)
        try:
            self._client: Any = redis.Redis.from_url(
                url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s, retry=Retry(NoBackoff(), 1)
            )
        except ValueError as error:
            why = "it cannot be read" if "@" in url else one_line(error)  # the error would show part of the password
            raise QueueError(f"queue.storage.url is no address of a Redis server: {why}") from None
        options = self._client.connection_pool.connection_kwargs
        self._address = options.get("path") or f"{options.get('host')}:{options.get('port')}"
        self._name = name
        with self._server():
            if self._client.exists(f"{name}:sizes"):
                raise QueueError(
                    f"Redis at {self._address} has parts of {name!r} that an older Tailrace stored, without what cells "
                    f"they have: end that queue with the version that began it, or delete the keys '{name}:*'"
                )
        self.take_stock()

    def store(self, written: Sequence[tuple[PartBatch, memoryview]]) -> None:
        """See `Storage.store`."""
        memories = dict(self._new(written))
        if not memories:
            return
        records = {part: record for batch, _ in written for part, record in _records(batch) if part in memories}
        with self._server(), self._client.pipeline(transaction=True) as pipeline:
            pipeline.mset({self._key(part): memory for part, memory in memories.items()})
            packed = {key_of(part): msgspec.msgpack.encode(record) for part, record in records.items()}
            pipeline.hset(self._parts_key, mapping=packed)
            pipeline.execute()
        self._sizes.update({part: record.size for part, record in records.items()})
        self._stored += sum(record.size for record in records.values())

    def take_stock(self) -> list[PartBatch]:
        """See `Storage.take_stock`. This asks the server."""
        with self._server():
            stored = dict(self._client.hscan_iter(self._parts_key, count=10_000))
        try:
            records = {_part(field): _decode(packed) for field, packed in stored.items()}
        except (ValueError, TypeError, msgspec.MsgspecError):
            raise QueueError(
                f"{self._parts_key!r} in Redis at {self._address} does not say what cells parts have; "
                f"give the queue another name"
            ) from None
        self._sizes = {part: record.size for part, record in records.items()}
        self._stored = sum(self._sizes.values())
        return _batches(records)

    def close(self) -> None:
        """Close the connections; the parts stay in the server."""
        self._client.close()

    def _fetch(self, parts: Sequence[PartId]) -> Sequence[bytes | None]:
        with self._server():
            found: Sequence[bytes | None] = self._client.mget(map(self._key, parts))
            return found

    def _remove(self, parts: Sequence[PartId]) -> None:
        with self._server(), self._client.pipeline(transaction=True) as pipeline:
            pipeline.unlink(*map(self._key, parts))
            pipeline.hdel(self._parts_key, *map(key_of, parts))
            pipeline.execute()

    def _look_again(self) -> None:
        self.take_stock()  # a server that was restarted or emptied has lost more than the parts that were missed

    @property
    def _parts_key(self) -> str:
        return f"{self._name}:parts"

    def _key(self, part: PartId) -> str:
        return f"{self._name}:{key_of(part)}"

    @contextmanager
    def _server(self) -> Iterator[None]:
        try:
            yield
        except redis.exceptions.OutOfMemoryError as error:
            raise StorageFull(f"Redis at {self._address} has no room: {one_line(error)}") from None
        except redis.RedisError as error:
            raise QueueError(f"Redis at {self._address} failed: {one_line(error)}") from None


def _part(field: bytes) -> PartId:
    slot, generation, tag = map(int, field.split(b":"))
    return PartId(slot, generation, tag)


def _decode(packed: bytes) -> _Record:
    record = msgspec.msgpack.decode(packed, type=_Record)
    if len(record.columns) != len(record.lengths):
        raise ValueError(f"{len(record.lengths)} lengths are not those of {len(record.columns)} columns")
    return record


def _records(batch: PartBatch) -> Iterator[tuple[PartId, _Record]]:
    columns = list(batch.columns)
    for part, size, lengths in zip(batch.parts, batch.sizes, batch.lengths.tolist(), strict=True):
        yield part, _Record(size, columns, lengths)


def _batches(records: Mapping[PartId, _Record]) -> list[PartBatch]:
    alike: dict[tuple[str, ...], list[PartId]] = {}
    for part, record in records.items():
        alike.setdefault(tuple(record.columns), []).append(part)
    batches = []
    for columns, parts in alike.items():
        lengths = np.array([records[part].lengths for part in parts], np.int64)
        batches.append(PartBatch(parts, columns, lengths, [records[part].size for part in parts]))
    return batches
