"""What a server remembers of its clients' requests, so that each is carried out once however often it comes."""

import heapq
from collections.abc import Collection, Iterator
from typing import NamedTuple

from tailrace.transfer.wire.frames import Reply
from tailrace.transfer.wire.handshake import name_of
from tailrace.transfer.wire.messages import Message


class _Open(NamedTuple):
    route: bytes
    keep: bool


class ClientAnswers:
    """Requests of one client by number: those that wait for their answer, and the answers that may be asked for again.

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


class Answers:
    """Those of all clients; a ticket is a client and the number of its request."""

    def __init__(self) -> None:
        self._of: dict[str, ClientAnswers] = {}

    @property
    def clients(self) -> Collection[str]:
        """All that are known."""
        return self._of.keys()

    def clients_named(self, name: str) -> list[str]:
        """The clients whose connections were made under this name."""
        return [client for client in self._of if name_of(client) == name]

    def of(self, client: str) -> ClientAnswers:
        """Those of one client, which is known from now on."""
        answers = self._of.get(client)
        if answers is None:
            answers = self._of[client] = ClientAnswers()
        return answers

    def forget(self, client: str) -> None:
        """A client is gone."""
        del self._of[client]

    def put(self, ticket: tuple[str, int], reply: Reply) -> bytes | None:
        """See `ClientAnswers.put`."""
        client, number = ticket
        answers = self._of.get(client)
        return None if answers is None else answers.put(number, reply)

    def get(self, ticket: tuple[str, int]) -> Message | None:
        """What a request that mutates was answered; None while it waits, or once its client has the answer."""
        client, number = ticket
        answers = self._of.get(client)
        kept = None if answers is None else answers.kept(number)
        return None if kept is None else kept.answer

    def recall(self, ticket: tuple[str, int], answer: Message) -> None:
        """What a request was answered by a server before this one; before `Server.run`."""
        client, number = ticket
        self.of(client).recall(number, Reply(answer))

    def items(self) -> Iterator[tuple[tuple[str, int], Message]]:
        """Requests whose answers may be asked for again, with these."""
        for client, answers in self._of.items():
            for number, reply in answers.all_kept():
                yield (client, number), reply.answer
