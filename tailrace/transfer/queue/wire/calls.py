"""What a client does, as generators without I/O: each yields calls to be made at once and receives their replies.

    put    [Admit to the controller] ─▶ [Write to the unit]
    claim  [Claim to the controller] ─▶ [Read to every unit that has some of the rows]
    ack    [Write to every unit]     ─▶ [Ack to the controller]

`SyncClient.run` and `AsyncClient.run` carry them out, with retries and limits; a Failure is raised inside the generator
at its `yield`. Nothing here knows how cells lie in memory: they come as frames and go as frames.
"""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import numpy as np

from tailrace.errors import WireError
from tailrace.transfer.queue.base import QueueStats, RowId
from tailrace.transfer.queue.wire.frames import Buffer, Reply
from tailrace.transfer.queue.wire.messages import (
    Accepted,
    Ack,
    Admit,
    Admitted,
    Answer,
    Cells,
    Claim,
    Claimed,
    Counted,
    Done,
    Look,
    Nack,
    Read,
    Renew,
    Request,
    Run,
    Stats,
    Unit,
    Welcome,
    Write,
    pack,
    row_ids,
    unpack,
)
from tailrace.transfer.queue.wire.sockets import host_id
from tailrace.types import IntArray

T = TypeVar("T")
A = TypeVar("A", bound=Answer)


@dataclass(frozen=True, slots=True)
class Call:
    """A request to one server."""

    to: str
    """Its endpoint."""
    message: Request
    frames: Sequence[Buffer] = ()
    """Not changed before the reply is there."""
    wait_s: float = 0.0
    """How long the server may wait for what was asked, beyond the time that any answer may take."""


@dataclass(frozen=True, slots=True)
class Step:
    """Calls made at once."""

    calls: Sequence[Call]
    otherwise: Sequence[Call] = ()
    """Sent where the step ends in an error or is cancelled; nobody waits for their answers."""


Operation: TypeAlias = Generator[Step, list[Reply], T]


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Rows with their cells, for one unit."""

    rows: IntArray
    """[n, 3]: group_id, group_size, order of new rows; [n, 2]: slot, generation of claimed ones."""
    versions: IntArray
    """[n], see `Admit.versions`."""
    runs: Sequence[Run]
    frames: Sequence[Buffer]
    """One for each run: its parts, one after the other."""


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """Cells of claimed rows, from one unit."""

    unit: int
    places: IntArray
    """Of these rows among those of the claim."""
    cells: Cells
    frames: Sequence[Buffer]


class Directory:
    """Where the servers of a queue are."""

    def __init__(self, controller: str) -> None:
        """`controller`: its endpoint."""
        self.controller = controller
        self._units: dict[int, Unit] = {}

    def look(self, *, otherwise: Sequence[Call] = ()) -> Operation[Welcome]:
        """Ask the controller for units, columns and tasks."""
        [reply] = yield Step([Call(self.controller, Look())], otherwise)
        welcome = expect(reply, Welcome)
        self._units = {unit.number: unit for unit in welcome.units}
        return welcome

    def unit(self, number: int, *, otherwise: Sequence[Call] = ()) -> Operation[Unit]:
        """A unit by its number; the controller is asked where it is not known yet.

        Raises:
            WireError: the controller does not know it either; `otherwise` has been done.
        """
        if number not in self._units:
            yield from self.look(otherwise=otherwise)
        if number not in self._units:
            if otherwise:
                yield Step(otherwise)
            raise WireError(f"the controller has named unit {number}, but its units are {sorted(self._units)}")
        return self._units[number]

    def endpoint(self, number: int, *, otherwise: Sequence[Call] = ()) -> Operation[str]:
        """Where to reach a unit: by ipc on its own host. `otherwise`: done where it cannot be found out.

        Raises:
            WireError: there is no such unit, or no way to it from here.
        """
        unit = yield from self.unit(number, otherwise=otherwise)
        local = unit.host == host_id()
        reachable = [endpoint for endpoint in unit.endpoints if local or not endpoint.startswith("ipc:")]
        if not reachable:
            if otherwise:
                yield Step(otherwise)
            raise WireError(f"unit {number} listens at {unit.endpoints} alone, which cannot be reached from this host")
        return min(reachable, key=lambda endpoint: not endpoint.startswith("ipc:"))


def put(directory: Directory, batch: Batch, *, wait_s: float) -> Operation[list[RowId]]:
    """Have new rows admitted, within `wait_s`, and write them. Returns their ids."""
    admit = Admit(pack(batch.rows), pack(batch.versions), list(batch.runs), wait_s)
    admitted = yield from _one(Call(directory.controller, admit, wait_s=wait_s), Admitted)
    unit = yield from directory.endpoint(admitted.unit)
    yield from _one(Call(unit, Write(0, admitted.rows, list(batch.runs), None), batch.frames), Accepted)
    return row_ids(admitted.rows)


def claim(
    directory: Directory, task: str, *, limit: int | None, rank: int | None, wait_s: float
) -> Operation[tuple[Claimed, list[Found]]]:
    """Lease rows, waiting up to `wait_s`, and read their cells. A lease whose cells do not come is given back."""
    message = Claim(task, limit, rank, wait_s)
    claimed = yield from _one(Call(directory.controller, message, wait_s=wait_s), Claimed)
    units = unpack(claimed.units, 1)[:, 0]
    rows = unpack(claimed.rows, 4)[:, :2]
    tags = np.frombuffer(claimed.tags, dtype=np.int64).reshape(len(rows), len(claimed.columns))
    give_back = Call(directory.controller, Nack(claimed.lease_id, None))
    reads: dict[int, tuple[IntArray, Call]] = {}
    for number in np.unique(units).tolist():
        places = np.flatnonzero(units == number)
        endpoint = yield from directory.endpoint(number, otherwise=[give_back])
        read = Read(pack(rows[places]), claimed.columns, pack(tags[places]), False)
        reads[number] = (places, Call(endpoint, read))
    replies = yield Step([call for _, call in reads.values()], otherwise=[give_back])
    return claimed, [
        Found(number, places, expect(reply, Cells), reply.frames)
        for (number, (places, _)), reply in zip(reads.items(), replies, strict=True)
    ]


def ack(directory: Directory, lease_id: int, outputs: Mapping[int, Batch]) -> Operation[None]:
    """Write output cells to the units that have the rows, then have them count."""
    writes: list[Call] = []
    for number, batch in outputs.items():
        if not batch.frames:
            continue  # a task without outputs
        endpoint = yield from directory.endpoint(number)
        writes.append(Call(endpoint, Write(lease_id, pack(batch.rows), list(batch.runs), None), batch.frames))
    for reply in (yield Step(writes)):
        expect(reply, Accepted)
    rows = b"".join(pack(batch.rows) for batch in outputs.values())
    versions = b"".join(pack(batch.versions) for batch in outputs.values())
    runs = [run for batch in outputs.values() for run in batch.runs]
    yield from _one(Call(directory.controller, Ack(lease_id, rows, versions, runs)), Accepted)


def nack(directory: Directory, lease_id: int, rows: Sequence[RowId] | None) -> Operation[None]:
    """Give rows back, by default all that are still leased."""
    message = Nack(lease_id, None if rows is None else pack(rows))
    yield from _one(Call(directory.controller, message), Accepted)


def renew(directory: Directory, lease_id: int) -> Operation[None]:
    """Start a lease's time anew."""
    yield from _one(Call(directory.controller, Renew(lease_id)), Accepted)


def done(directory: Directory, unit: int, pins: Sequence[int]) -> Operation[None]:
    """Let a unit use the memory of these reads again."""
    endpoint = yield from directory.endpoint(unit)
    yield from _one(Call(endpoint, Done(list(pins), [])), Accepted)


def stats(directory: Directory) -> Operation[QueueStats]:
    """Counts of the queue."""
    return (yield from _one(Call(directory.controller, Stats()), Counted)).stats


def expect(reply: Reply, kind: type[A]) -> A:
    """The answer, which must be of this kind.

    Raises:
        WireError: it is another.
    """
    if not isinstance(reply.answer, kind):
        raise WireError(f"got the answer {type(reply.answer).__name__}, expected {kind.__name__}")
    return reply.answer


def _one(call: Call, kind: type[A]) -> Operation[A]:
    [reply] = yield Step([call])
    return expect(reply, kind)
