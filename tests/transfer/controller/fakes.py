"""A server without sockets for a controller, and units that it links to. Each request is carried out at once."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tailrace.config.columns import COLUMNS, ColumnKind
from tailrace.config.transfer import ServiceQueueConfig
from tailrace.errors import PeerLost, QueueClosed, StaleRowError, TailraceError
from tailrace.transfer.queue.base import RowId
from tailrace.transfer.queue.controller.journal import Journal
from tailrace.transfer.queue.controller.service import Controller
from tailrace.transfer.queue.messages import (
    Copy,
    Inventory,
    Join,
    Parts,
    ReadTable,
    Settle,
    Table,
    Write,
    pack,
    row_ids,
    unpack,
)
from tailrace.transfer.queue.rows.table import QueueTask
from tailrace.transfer.queue.storage.base import PartId
from tailrace.transfer.wire.calls import Call
from tailrace.transfer.wire.frames import Buffer, Reply
from tailrace.transfer.wire.messages import Accepted, Failure, Message
from tailrace.transfer.wire.server import Incoming, Ticket
from tailrace.transfer.wire.sockets import host_id

Then = Callable[[Reply | TailraceError], None]


class FakeUnit:
    """A unit that knows which parts it has, but not their bytes."""

    def __init__(self, name: str, *, lasting: bool = False, max_bytes: int = 2**30) -> None:
        self.name = name
        self.incarnation = 1
        self.lasting = lasting
        self.max_bytes = max_bytes
        self.parts: set[PartId] = set()
        self.writes: list[tuple[Write, Sequence[Buffer], Then]] = []
        """The controller's writes. They are carried out by `write_all`."""
        self.copies: list[tuple[Copy, Then]] = []
        """The controller's copies. They are carried out by `Site.copy_all`."""
        self.leaving = False
        self.left: set[RowId] = set()
        """The rows that have left: the unit takes no more parts of them."""
        self.failures: list[TailraceError] = []
        """The errors that take the place of the next answers to Settle."""
        self.mute = False
        """Whether the unit joins but does not answer with its inventory."""
        self.number = -1

    @property
    def endpoint(self) -> str:
        return f"tcp://{self.name}"

    def die(self) -> None:
        """Die, and start again as a new incarnation."""
        self.incarnation += 1
        self.leaving = False
        if not self.lasting:
            self.parts.clear()

    def write_all(self, error: TailraceError | None = None) -> None:
        """Carry out the controller's writes, or refuse them with `error`."""
        writes, self.writes = self.writes, []
        for write, frames, then in writes:
            assert write.told
            assert len(frames) == len(write.runs)
            if error is None:
                self.parts.update(PartId(*row, write.tag) for row in row_ids(write.rows))
            then(error or Reply(Accepted()))

    def join(self) -> Join:
        return Join(
            self.name, str(self.incarnation), self.lasting, [self.endpoint], host_id(), "", self.max_bytes, self.leaving
        )

    def hear(self, message: Message) -> Message | None:
        match message:
            case Inventory() if not self.mute:
                return Parts(_packed(self.parts))
            case Settle():
                self.parts.difference_update(PartId(*part) for part in unpack(message.parts, 3).tolist())
                gone = set(row_ids(message.rows))
                self.left |= gone
                self.parts = {part for part in self.parts if part[:2] not in gone}
        return None


class FakeLink:
    def __init__(self, unit: FakeUnit) -> None:
        self._unit = unit

    def start(self, call: Call, then: Then) -> None:
        if isinstance(call.message, Write):
            self._unit.writes.append((call.message, call.frames, then))
            return
        if isinstance(call.message, Copy):
            self._unit.copies.append((call.message, then))
            return
        if isinstance(call.message, Settle) and self._unit.failures:
            then(self._unit.failures.pop(0))
            return
        answer = self._unit.hear(call.message)
        if answer is not None:
            then(Reply(answer))

    def close(self) -> None:
        copies, self._unit.copies = self._unit.copies, []
        for _, then in copies:
            then(QueueClosed("the link was closed"))


class FakeAnswers(dict[Ticket, Message]):
    """A fake of `Answers`. Clients are identified by their names."""

    def __init__(self) -> None:
        super().__init__()
        self.cancelled: list[tuple[str, int]] = []
        """Requests that would be carried out anew if they came again."""

    def cancel(self, ticket: tuple[str, int]) -> None:
        self.cancelled.append(ticket)

    def recall(self, ticket: Ticket, answer: Message) -> None:
        self[ticket] = answer

    def clients_named(self, name: str) -> list[str]:
        return [name]


class FakeServer:
    """A fake of `Server`."""

    def __init__(self, units: Sequence[FakeUnit], now: float) -> None:
        self.now = now
        self.answers = FakeAnswers()
        self._units = {unit.endpoint: unit for unit in units}

    def add(self, unit: FakeUnit) -> None:
        self._units[unit.endpoint] = unit

    def link(self, endpoint: str, *, peer: str) -> FakeLink:
        return FakeLink(self._units[endpoint])

    def unlink(self, link: FakeLink) -> None:
        link.close()

    def reply(self, ticket: Ticket, answer: Message) -> None:
        self.answers[ticket] = answer


class Site:
    """A controller with its units and one journal. It can be ended and started again."""

    def __init__(
        self,
        tasks: Callable[[], Sequence[QueueTask]],
        directory: Path,
        *,
        units: Sequence[FakeUnit] = (),
        columns: Mapping[str, ColumnKind] = COLUMNS,
        **config: Any,
    ) -> None:
        """`tasks` makes the table, with new policies each time."""
        self.units = list(units) or [FakeUnit("a")]
        self._tasks = tasks
        self._directory = directory
        self._columns = columns
        self._config = ServiceQueueConfig(**config)
        self._journal: Journal | None = None
        self._numbers = 0
        self.now = 0.0
        self.start()

    def start(self, *, away: Sequence[FakeUnit] = ()) -> None:
        """Start a new controller on the journal of the one before. All units join it, except those that are away."""
        self.end()
        for unit in self.units:
            unit.copies.clear()
        self._journal = Journal(self._directory / "journal")
        self.server = FakeServer(self.units, self.now)
        self.controller = Controller(
            self.server,  # type: ignore[arg-type]
            self._tasks(),
            self._config,
            columns=self._columns,
            journal=self._journal,
        )
        for unit in self.units:
            if unit not in away:
                self.join(unit)

    def end(self) -> None:
        """Release the journal, as the death of a controller does."""
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    def join(self, unit: FakeUnit) -> None:
        """Have a unit give a sign of life. One that may go is taken off."""
        joined = self.ask(unit.join())
        unit.number, unit.leaving = joined.unit, joined.leaving
        if joined.left:
            self.units.remove(unit)

    def add(self, unit: FakeUnit) -> None:
        """Have a new unit join."""
        self.units.append(unit)
        self.server.add(unit)
        self.join(unit)

    def copy(self, error: TailraceError | None = None) -> None:
        """Carry out the copies that were asked for, or refuse them with `error`."""
        for source in self.units:
            copies, source.copies = source.copies, []
            for copy, then in copies:
                then(error or self._copied(source, copy))

    def _copied(self, source: FakeUnit, copy: Copy) -> Reply | TailraceError:
        parts = {PartId(*part) for part in unpack(copy.parts, 3).tolist()}
        target = next((unit for unit in self.units if unit.number == copy.to.number), None)
        if target is None:
            return PeerLost("the target is dead")
        if not parts <= source.parts or target.left.intersection(RowId(*part[:2]) for part in parts):
            return StaleRowError("a row has left")
        target.parts |= parts
        return Reply(Accepted())

    def send(self, message: Message, client: str = "client") -> Ticket:
        """Send a request whose answer may have to wait."""
        self._numbers += 1
        ticket = Ticket(client, self._numbers)
        try:
            reply = self.controller.handlers[type(message)](Incoming(ticket, message, ()))
        except TailraceError as error:
            reply = Reply(Failure.of(error))
        if reply is not None:
            self.server.answers[ticket] = reply.answer
        return ticket

    def answer(self, ticket: Ticket) -> Any:
        """The answer to a request, or None while it waits.

        Raises:
            TailraceError: the answer is an error.
        """
        answer = self.server.answers.get(ticket)
        if isinstance(answer, Failure):
            raise answer.error()
        return answer

    def ask(self, message: Message, client: str = "client") -> Any:
        """Send a request and return its answer. One that would wait times out at once."""
        ticket = self.send(message, client)
        self.tick()
        return self.answer(ticket)

    def table(self) -> Table:
        table: Table = self.ask(ReadTable())
        return table

    def tick(self, seconds: float = 0.0) -> None:
        """Let time pass."""
        until = self.now + seconds
        while (when := self.controller.next_deadline) is not None and when <= until:
            self.now = self.server.now = max(self.now, when)
            self.controller.tick(self.now)
        self.now = self.server.now = until

    def unit(self, number: int) -> FakeUnit:
        return next(unit for unit in self.units if unit.number == number)


def _packed(parts: set[PartId]) -> bytes:
    return pack(np.array(sorted(parts), dtype=np.int64).reshape(-1, 3))
