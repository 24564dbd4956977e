"""A server's memory of its clients' requests, so that each is carried out once however often it comes."""

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
    """The requests of one client by number: those that wait for an answer, and the answers that may be asked for again.

    This holds no more than the client has requests under way: with each request, the client says which answers it has.
    Answers with frames are not kept: they are long, and making them again changes nothing.
    """

    def __init__(self) -> None:
        self._open: dict[int, _Open] = {}
        self._kept: dict[int, Reply] = {}
        self._numbers: list[int] = []
        """A heap of the keys of `_kept`."""
        self._oldest = 0

    def forget(self, oldest: int) -> None:
        """Forget the answers to all requests before `oldest`: the client has them or does not want them."""
        self._oldest = max(self._oldest, oldest)
        while self._numbers and self._numbers[0] < self._oldest:
            del self._kept[heapq.heappop(self._numbers)]

    def is_old(self, number: int) -> bool:
        """Whether the number is that of a late copy of a request whose answer the client has."""
        return number < self._oldest

    def waits(self, number: int) -> bool:
        """Whether the request has come, and has no answer yet."""
        return number in self._open

    def kept(self, number: int) -> Reply | None:
        """The answer that the request got before, if it is kept."""
        return self._kept.get(number)

    def recall(self, number: int, reply: Reply) -> None:
        """Keep an answer that may be asked for again."""
        self._kept[number] = reply
        heapq.heappush(self._numbers, number)

    def all_kept(self) -> Iterator[tuple[int, Reply]]:
        """All answers that may be asked for again, by request number."""
        return iter(self._kept.items())

    def open(self, number: int, route: bytes) -> None:
        """Record that the request has come, or come again, on the connection `route`: its answer goes there."""
        known = self._open.get(number)
        self._open[number] = _Open(route, known is not None and known.keep)

    def keep(self, number: int) -> None:
        """Keep the future answer of this request, since it may be asked for again."""
        self._open[number] = self._open[number]._replace(keep=True)

    def put(self, number: int, reply: Reply) -> bytes | None:
        """Record the answer; return the connection that it goes to, or None if the request no longer waits."""
        entry = self._open.pop(number, None)
        if entry is None:
            return None
        if entry.keep and not reply.frames:
            self.recall(number, reply)
        return entry.route

    def cancel(self, number: int) -> None:
        """Forget a request whose answer is no longer wanted."""
        self._open.pop(number, None)


class Answers:
    """The requests and answers of all clients. A ticket is a client and the number of its request."""

    def __init__(self) -> None:
        self._of: dict[str, ClientAnswers] = {}

    @property
    def clients(self) -> Collection[str]:
        """All known clients."""
        return self._of.keys()

    def clients_named(self, name: str) -> list[str]:
        """The clients whose connections were made under this name."""
        return [client for client in self._of if name_of(client) == name]

    def of(self, client: str) -> ClientAnswers:
        """The requests and answers of one client, which is known from now on."""
        answers = self._of.get(client)
        if answers is None:
            answers = self._of[client] = ClientAnswers()
        return answers

    def forget(self, client: str) -> None:
        """Forget a client that is gone."""
        del self._of[client]

    def cancel(self, ticket: tuple[str, int]) -> None:
        """See `ClientAnswers.cancel`; harmless where the client is gone."""
        client, number = ticket
        if client in self._of:
            self._of[client].cancel(number)

    def put(self, ticket: tuple[str, int], reply: Reply) -> bytes | None:
        """See `ClientAnswers.put`."""
        client, number = ticket
        answers = self._of.get(client)
        return None if answers is None else answers.put(number, reply)

    def get(self, ticket: tuple[str, int]) -> Message | None:
        """The answer to a request that mutates; None while it waits, or once its client has the answer."""
        client, number = ticket
        answers = self._of.get(client)
        kept = None if answers is None else answers.kept(number)
        return None if kept is None else kept.answer

    def recall(self, ticket: tuple[str, int], answer: Message) -> None:
        """Keep an answer that a former server gave. Called before `Server.run`."""
        client, number = ticket
        self.of(client).recall(number, Reply(answer))

    def items(self) -> Iterator[tuple[tuple[str, int], Message]]:
        """The requests whose answers may be asked for again, with the answers."""
        for client, answers in self._of.items():
            for number, reply in answers.all_kept():
                yield (client, number), reply.answer
