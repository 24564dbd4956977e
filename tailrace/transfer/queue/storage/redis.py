"""Parts in a Redis server, where they survive the unit.

    bytes of the caller ──store: one transaction──▶ <name>:<slot>:<generation>:<tag>   the bytes of each part
                                                    <name>:sizes                       a hash of all parts' sizes

A new unit of the same name finds the parts of the old one. One unit at a time may use a name: it knows without asking
which parts there are, until it reads one that the server has lost; then it asks. Every change may be repeated, so a
call that failed half-way is put right by the next try.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tailrace.errors import QueueError, StorageFull, one_line
from tailrace.transfer.queue.storage.base import PartId, Storage, stale


class RedisStorage(Storage):
    """See `Storage` for the contract; a call that needs the server raises QueueError where the server fails it.

    What `read` returned stays good even when the part is dropped.
    """

    lasting = True

    def __init__(self, *, url: str, name: str, timeout_s: float, max_bytes: int) -> None:
        """Connect, and find the parts that were stored under `name`.

        `url`: such as redis://127.0.0.1:6379/0. `timeout_s`: a call that the server does not answer for so long is
        tried once more, on a new connection. `max_bytes`: of all parts.

        Raises:
            QueueError: the server cannot be reached, or what is stored under `name` is not parts.
        """
        super().__init__(max_bytes=max_bytes)
        try:
            self._client: Any = redis.Redis.from_url(
                url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s, retry=Retry(NoBackoff(), 1)
            )
        except ValueError as error:
            why = "it cannot be read" if "@" in url else one_line(error)  # which would show a part of the password
            raise QueueError(f"queue.storage.url is no address of a Redis server: {why}") from None
        options = self._client.connection_pool.connection_kwargs
        self._address = options.get("path") or f"{options.get('host')}:{options.get('port')}"
        self._name = name
        self._load()

    def read(self, part: PartId) -> memoryview:
        """See `Storage.read`."""
        return self.read_many([part])[0]

    def read_many(self, parts: Sequence[PartId]) -> list[memoryview]:
        """See `Storage.read_many`. The server is asked once."""
        for part in parts:
            if part not in self._sizes:
                raise stale(part)
        with self._server():
            found = self._client.mget(map(self._key, parts)) if parts else []
        lost = [part for part, stored in zip(parts, found, strict=True) if stored is None]
        if lost:
            self.drop(lost)
            self._load()  # a server that was started anew, or emptied, has lost more than these
            raise stale(lost[0])
        return [memoryview(stored) for stored in found]

    def size(self, part: PartId) -> int:
        """See `Storage.size`."""
        if part not in self._sizes:
            raise stale(part)
        return self._sizes[part]

    def drop(self, parts: Iterable[PartId]) -> None:
        """See `Storage.drop`."""
        known = [part for part in dict.fromkeys(parts) if part in self._sizes]
        if not known:
            return
        with self._server(), self._client.pipeline(transaction=True) as pipeline:
            pipeline.unlink(*map(self._key, known))
            pipeline.hdel(self._sizes_key, *map(_field, known))
            pipeline.execute()
        for part in known:
            self._stored -= self._sizes.pop(part)

    def parts(self) -> Iterator[PartId]:
        """See `Storage.parts`."""
        return iter(list(self._sizes))

    def __contains__(self, part: PartId) -> bool:
        """See `Storage.__contains__`."""
        return part in self._sizes

    def close(self) -> None:
        """Close the connections; the parts stay in the server."""
        self._client.close()

    def _keep(self, parts: Sequence[tuple[PartId, memoryview]]) -> None:
        if not parts:
            return
        sizes = {part: memory.nbytes for part, memory in parts}
        with self._server(), self._client.pipeline(transaction=True) as pipeline:
            pipeline.mset({self._key(part): memory for part, memory in parts})
            pipeline.hset(self._sizes_key, mapping={_field(part): size for part, size in sizes.items()})
            pipeline.execute()
        self._sizes.update(sizes)
        self._stored += sum(sizes.values())

    @property
    def _sizes_key(self) -> str:
        return f"{self._name}:sizes"

    def _key(self, part: PartId) -> str:
        return f"{self._name}:{_field(part)}"

    def _load(self) -> None:
        with self._server():
            stored = dict(self._client.hscan_iter(self._sizes_key, count=10_000))
        try:
            self._sizes = {_part(field): int(size) for field, size in stored.items()}
        except (ValueError, TypeError):
            raise QueueError(
                f"{self._sizes_key!r} in Redis at {self._address} does not hold sizes of parts; "
                f"give the queue another name"
            ) from None
        self._stored = sum(self._sizes.values())

    @contextmanager
    def _server(self) -> Iterator[None]:
        try:
            yield
        except redis.exceptions.OutOfMemoryError as error:
            raise StorageFull(f"Redis at {self._address} has no room: {one_line(error)}") from None
        except redis.RedisError as error:
            raise QueueError(f"Redis at {self._address} failed: {one_line(error)}") from None


def _field(part: PartId) -> str:
    return f"{part.slot}:{part.generation}:{part.tag}"


def _part(field: bytes) -> PartId:
    slot, generation, tag = map(int, field.split(b":"))
    return PartId(slot, generation, tag)
