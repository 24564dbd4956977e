"""What a server remembers of one client's requests, so that each is carried out once however often it comes."""

import heapq
from collections.abc import Iterator
from typing import NamedTuple

from tailrace.transfer.wire.frames import Reply


class _Open(NamedTuple):
    route: bytes
    keep: bool


class Answers:
    """Requests by number: those that wait for their answer, and the answers that may be asked for again.

    It holds no more than the client has requests under way: with each, the client says which answers it has. Those with
    frames are long and change nothing when they are made again: they are not kept.
    """

    def __init__(self) -> None:
        self._open: dict[int, _Open] = {}
        self._kept: dict[int, Reply] = {}
        self._numbers: list[int] = []
        """Heap of the keys of `_kept`."""
        self._oldest = 0

    def forget(self, oldest: int) -> None:
        """The client has the answers of all requests before `oldest`, or does not want them."""
        self._oldest = max(self._oldest, oldest)
        while self._numbers and self._numbers[0] < self._oldest:
            del self._kept[heapq.heappop(self._numbers)]

    def is_old(self, number: int) -> bool:
        """Whether this is a late copy of a request whose answer the client has."""
        return number < self._oldest

    def waits(self, number: int) -> bool:
        """Whether the request has come, and has no answer yet."""
        return number in self._open

    def kept(self, number: int) -> Reply | None:
        """The answer that the request got before."""
        return self._kept.get(number)

    def recall(self, number: int, reply: Reply) -> None:
        """The request was answered before this was made."""
        self._kept[number] = reply
        heapq.heappush(self._numbers, number)

    def all_kept(self) -> Iterator[tuple[int, Reply]]:
        """All that may be asked for again."""
        return iter(self._kept.items())

    def open(self, number: int, route: bytes) -> None:
        """The request has come, or has come again, on the connection `route`: its answer goes there."""
        known = self._open.get(number)
        self._open[number] = _Open(route, known is not None and known.keep)

    def keep(self, number: int) -> None:
        """The answer of this request may be asked for again."""
        self._open[number] = self._open[number]._replace(keep=True)

    def put(self, number: int, reply: Reply) -> bytes | None:
        """The request is answered; returns the connection that the answer goes to, None where nobody waits for it."""
        entry = self._open.pop(number, None)
        if entry is None:
            return None
        if entry.keep and not reply.frames:
            self.recall(number, reply)
        return entry.route

    def cancel(self, number: int) -> None:
        """Nobody waits for the answer any more."""
        self._open.pop(number, None)
