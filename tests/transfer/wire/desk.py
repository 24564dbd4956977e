"""A controller and a unit in one, for tests: rows wait for claims, and cells are the bytes that came.

`python -m tests.transfer.wire.desk TOKEN ENDPOINT…` prints its endpoints and serves until a signal.
"""

import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from tailrace.errors import LeaseError, QueueTimeout
from tailrace.transfer.queue.base import QueueStats, RowId
from tailrace.transfer.queue.messages import (
    QUEUE,
    Ack,
    Admit,
    Admitted,
    Cells,
    Claim,
    Claimed,
    Counted,
    Nack,
    Read,
    Renew,
    Stats,
    Write,
    pack,
    row_ids,
    unpack,
)
from tailrace.transfer.wire.frames import Reply
from tailrace.transfer.wire.messages import Accepted, Cancel, Failure, Message
from tailrace.transfer.wire.server import Handler, Incoming, Server, Service, Ticket, stopped_by_signals
from tailrace.transfer.wire.sockets import DEFAULT_ENDPOINTS
from tests.transfer.wire.rows import cells_of, packed

TOKEN = b"a token that nobody guesses"
LIMIT_S = 20
UNIT = 7


class Desk(Service):
    """A service with one task, whose claims get one row each.

    Its stats count waiting rows, written bytes and waiting claims.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._ready: deque[RowId] = deque()
        self._admitted = 0
        self._leases: dict[int, RowId] = {}
        self._claims: dict[Ticket, float] = {}
        self.parts: dict[tuple[int, int, int], bytes] = {}
        self._next_lease = 1
        self.forgotten: list[str] = []

    @property
    def handlers(self) -> Mapping[type[Message], Handler]:
        return {
            Admit: self._admit,
            Claim: self._claim,
            Cancel: self._cancel,
            Ack: self._ack,
            Nack: self._nack,
            Renew: self._renew,
            Stats: self._stats,
            Write: self._write,
            Read: self._read,
        }

    @property
    def next_deadline(self) -> float | None:
        return min(self._claims.values(), default=None)

    def tick(self, now: float) -> None:
        for ticket in [ticket for ticket, deadline in self._claims.items() if deadline <= now]:
            del self._claims[ticket]
            self._server.reply(ticket, Failure.of(QueueTimeout("a claim waited its limit")))

    def gone(self, client: str) -> None:
        self.forgotten.append(client)

    def _admit(self, incoming: Incoming) -> Reply:
        count = len(unpack(incoming.message.rows, 3))
        rows = [RowId(self._admitted + index, 0) for index in range(count)]
        self._admitted += count
        if not incoming.message.runs:  # else the rows are ready when they are written
            self._ready += rows
            self._serve()
        return Reply(Admitted(pack(rows), [UNIT]))

    def _claim(self, incoming: Incoming) -> None:
        self._claims[incoming.ticket] = time.monotonic() + incoming.message.wait_s
        self._serve()

    def _serve(self) -> None:
        while self._ready and self._claims:
            ticket = next(iter(self._claims))
            del self._claims[ticket]
            lease, row = self._next_lease, self._ready.popleft()
            self._next_lease += 1
            self._leases[lease] = row
            rows = packed([[*row, 3, 300 + row.slot]])
            claimed = Claimed(lease, 60.0, rows, packed([[UNIT]]), 1, ["prompt_ids"], packed([[0]]))
            self._server.reply(ticket, claimed)

    def _cancel(self, incoming: Incoming) -> Reply:
        ticket = Ticket(incoming.ticket.client, incoming.message.number)
        self._claims.pop(ticket, None)
        match self._server.answers.get(ticket):
            case Claimed(lease_id=lease):
                self._give_back(lease)
        return Reply(Accepted())

    def _give_back(self, lease: int) -> None:
        if lease not in self._leases:
            raise LeaseError(f"lease {lease} holds nothing")
        self._ready.appendleft(self._leases.pop(lease))
        self._serve()

    def _ack(self, incoming: Incoming) -> Reply:
        if self._leases.pop(incoming.message.lease_id, None) is None:
            raise LeaseError(f"lease {incoming.message.lease_id} holds nothing")
        return Reply(Accepted())

    def _nack(self, incoming: Incoming) -> Reply:
        self._give_back(incoming.message.lease_id)
        return Reply(Accepted())

    def _renew(self, incoming: Incoming) -> Reply:
        if incoming.message.lease_id not in self._leases:
            raise LeaseError(f"lease {incoming.message.lease_id} holds nothing")
        return Reply(Accepted())

    def _stats(self, incoming: Incoming) -> Reply:
        size = sum(map(len, self.parts.values()))
        return Reply(Counted(QueueStats(rows=len(self._ready), bytes=size, blocked_puts=len(self._claims), tasks={})))

    def _write(self, incoming: Incoming) -> Reply:
        rows = row_ids(incoming.message.rows)
        unwritten = iter(rows)
        for run, frame in zip(incoming.message.runs, incoming.frames, strict=True):
            for cell in cells_of(run, frame):
                self.parts[(*next(unwritten), incoming.message.tag)] = bytes(cell)
        if incoming.message.tag == 0:
            self._ready += rows
            self._serve()
        return Reply(Accepted())

    def _read(self, incoming: Incoming) -> Reply:
        rows, tags = unpack(incoming.message.rows, 2).tolist(), unpack(incoming.message.tags, 1).tolist()
        cells = [self.parts[(*row, *tag)] for row, tag in zip(rows, tags, strict=True)]
        places = packed([[[frame, 0]] for frame in range(len(cells))])
        return Reply(Cells(packed([[len(cell) // 8] for cell in cells]), places, [], None), cells)


@contextmanager
def serving(server: Server, service: Service | None = None) -> Iterator[Server]:
    """Run `server` in a thread."""
    thread = threading.Thread(target=server.run, args=(service or Desk(server),))
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join(LIMIT_S)
        assert not thread.is_alive(), "the server does not stop"


def main() -> None:
    token, *endpoints = sys.argv[1:]
    server = Server("desk", token.encode(), QUEUE, endpoints=endpoints or DEFAULT_ENDPOINTS)
    with stopped_by_signals(server):
        print(*server.endpoints, flush=True)
        server.run(Desk(server))


if __name__ == "__main__":
    main()
