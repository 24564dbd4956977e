"""What controller, units and clients of a queue say to each other, beside the messages of the wire itself.

    client ──▶ controller   ReadTable, Admit, Withdraw, Claim, Ack, Nack, Renew, Advance, Lost, Stats, Close, Dismiss
                            Export, Release, Restore
    client ──▶ unit         Reserve, Write, Read, Done
    unit ──▶ controller     Join, Written
    controller ──▶ unit     Settle, Inventory

A set of rows travels as packed int64, little-endian, row by row: `rows [n, 2]` is the slot and generation of n rows.
"""

from collections.abc import Iterable
from itertools import chain
from typing import Annotated, ClassVar

import msgspec
import numpy as np
from msgspec import Meta

from tailrace.config.columns import ColumnKind
from tailrace.errors import WireError
from tailrace.transfer.queue.base import QueueStats, RowId
from tailrace.transfer.queue.rows.state import ControlState
from tailrace.transfer.wire.messages import Accepted, Count, Failure, Message, Name, Seconds
from tailrace.transfer.wire.protocol import Protocol
from tailrace.types import IntArray, TaskSpec

NO_VERSION = -1
"""Stands for the weight version of a row without `weight_versions`."""
NO_UNIT = -1
"""Fills up a row of unit numbers."""

_PACKED = np.dtype("<i8")
ROW_ID_BYTES = 2 * _PACKED.itemsize
"""Of each row's id, packed."""


class Run(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Consecutive rows with cells in the same columns."""

    rows: Count
    columns: list[str]
    """In the order in which their cells lie in memory."""
    lengths: bytes
    """[rows, columns]: elements of arrays, bytes of text and JSON values, 1 for numbers."""

    def table(self) -> IntArray:
        """`lengths` as an array.

        Raises:
            WireError: they are not of that shape.
        """
        if len(self.lengths) != self.rows * len(self.columns) * _PACKED.itemsize:
            raise WireError(
                f"{len(self.lengths)} bytes are not the lengths of {self.rows} rows in {len(self.columns)} columns"
            )
        return np.frombuffer(self.lengths, dtype=_PACKED).reshape(self.rows, len(self.columns))


class Inline(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Cells that are said and not fetched."""

    lengths: bytes
    """[n, columns], see `Run.lengths`."""
    starts: bytes
    """[n, columns], bytes from the beginning of `data`."""
    data: bytes


class Unit(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A storage unit."""

    number: Count
    endpoints: list[str]
    """Where it listens: any of them."""
    host: str
    """See `host_id`: clients with the same one share its memory."""
    directory: str
    """Of the files of its shared memory; empty where it has none."""


# To the controller


class ReadTable(Message, frozen=True):
    """Ask what the queue is made of."""


class Table(Message, frozen=True):
    """Answer to ReadTable."""

    units: list[Unit]
    columns: dict[str, ColumnKind]
    tasks: list[TaskSpec]
    recovering: bool = False
    """Of a controller that was started anew: `units` are those that have come back, and others may."""


class Dismiss(Message, frozen=True):
    """Clients of this name have ended: what they held goes back now. Sent by who saw them end."""

    name: Name


class Admit(Message, frozen=True):
    """Ask for room for new rows: whole groups, all or none."""

    mutates: ClassVar[bool] = True
    rows: bytes
    """[n, 3]: group_id, group_size, order."""
    versions: bytes
    """[n], the oldest weight version of each row, or NO_VERSION."""
    runs: list[Run]
    """Of all rows, in their order."""
    not_before: Count
    """The newest `NewRow.not_before` among them."""
    wait_s: Seconds
    cells: bytes | None = None
    """The parts of all rows, one after the other, where they are so small that the controller is to write them."""
    preferred: list[Count] = []
    """Units at which the sender has room for the rows already."""
    full: list[Count] = []
    """Units that had none when they were tried: any other one is better."""


class Admitted(Message, frozen=True):
    """Answer to Admit and Restore: write the rows there now."""

    rows: bytes
    """[n, 2], in the order of the request."""
    units: list[Count]
    """Each of them gets all rows; none where the controller has written them."""


class Withdraw(Message, frozen=True):
    """The sender will not write (all of) these admitted rows."""

    mutates: ClassVar[bool] = True
    rows: bytes
    """[n, 2]: all rows of one Admitted."""
    groups: bytes
    """[n]: the group of each."""


class Withdrawn(Message, frozen=True):
    """Answer to Withdraw."""

    done: bool
    """False where the rows were in the queue: their writing had come about. True where they may be put again."""


class Claim(Message, frozen=True):
    """Ask for rows under a lease."""

    mutates: ClassVar[bool] = True
    task: str
    limit: Count | None
    """At most so many rows."""
    rank: int | None
    """For policies that choose for each rank."""
    wait_s: Seconds


class Claimed(Message, frozen=True):
    """Answer to Claim."""

    lease_id: int
    lease_s: float
    rows: bytes
    """[n, 4]: slot, generation, group_id, order."""
    units: bytes
    """[n, width], the numbers of the units that have the row, the one to read from first, filled up with NO_UNIT."""
    width: Count
    columns: list[str]
    """Those that the task reads."""
    tags: bytes
    """[n, columns]: the tag of the part whose cell counts."""
    cells: Inline | None = None
    """All of them, where the controller knows them."""


class Ack(Message, frozen=True):
    """The outputs under tag `lease_id` count, and the rows are consumed."""

    mutates: ClassVar[bool] = True
    lease_id: int
    rows: bytes
    """[n, 2]"""
    versions: bytes
    """[n], the oldest weight version among the outputs of each row, or NO_VERSION."""
    runs: list[Run]
    missed: list[Count]
    """Units that have some of the rows but could not be written to: they count no more as having them."""


class Nack(Message, frozen=True):
    """Give rows back."""

    mutates: ClassVar[bool] = True
    lease_id: int
    rows: bytes | None
    """[n, 2]; None for all that are still leased, be it none."""


class Renew(Message, frozen=True):
    """Start the time of a lease anew."""

    lease_id: int


class Stats(Message, frozen=True):
    """Ask for counts."""


class Counted(Message, frozen=True):
    """Answer to Stats."""

    stats: QueueStats


class Advance(Message, frozen=True):
    """Weights of this version are there."""

    version: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]


class Lost(Message, frozen=True):
    """Ask for groups that have to be put again."""

    wait_s: Seconds


class Groups(Message, frozen=True):
    """Answer to Lost."""

    ids: bytes
    """[n]: group_ids."""


class Close(Message, frozen=True):
    """The queue is closed for everybody."""


class Export(Message, frozen=True):
    """Ask for the state of this moment. Its parts stay readable until Release, or until the client is gone."""

    mutates: ClassVar[bool] = True


class Exported(Message, frozen=True):
    """Answer to Export."""

    state: ControlState
    hold: int


class Release(Message, frozen=True):
    """The parts of an exported state have been read."""

    mutates: ClassVar[bool] = True
    hold: int


class Restore(Message, frozen=True):
    """Ask an empty queue to take over a state. Each row is written as one part with all of its columns, under tag 0."""

    mutates: ClassVar[bool] = True
    state: ControlState


class Join(Message, frozen=True):
    """A unit offers itself, and does so again and again as a sign of life."""

    name: Name
    """The same after a restart."""
    incarnation: str
    """Another one after a restart."""
    lasting: bool
    """Whether what it stores outlasts it: after a restart it is the same unit, else a new one."""
    endpoints: list[str]
    host: str
    directory: str
    max_bytes: Count


class Joined(Message, frozen=True):
    """Answer to Join."""

    unit: Count
    columns: dict[str, ColumnKind]


class Written(Message, frozen=True):
    """A unit has the parts of these rows under tag 0."""

    unit: Count
    rows: bytes
    """[n, 2]"""


# To a unit


class Reserve(Message, frozen=True):
    """Ask for shared memory to write parts into."""

    mutates: ClassVar[bool] = True
    nbytes: Count


class Reserved(Message, frozen=True):
    """Answer to Reserve."""

    place: int
    segment: str
    """A file in the unit's directory."""
    offset: Count
    """Bytes."""


class Write(Message, frozen=True):
    """Parts for rows. Without a place, a frame for each run comes along: its parts one after the other."""

    mutates: ClassVar[bool] = True
    tag: Count
    """0 for new rows, else the lease id."""
    rows: bytes
    """[n, 2]"""
    runs: list[Run]
    place: int | None
    """The reserved one that holds them, one after the other."""
    told: bool = False
    """Whether the controller sends it: it need not be told that new rows have come."""


class Read(Message, frozen=True):
    """Ask for cells. It mutates by pinning: an answer with frames is not kept, a repetition reads them again."""

    mutates: ClassVar[bool] = True
    rows: bytes
    """[n, 2]"""
    columns: list[str]
    tags: bytes
    """[n, columns]"""
    shared: bool
    """Whether the sender can map the unit's memory."""


class Cells(Message, frozen=True):
    """Answer to Read: where each cell begins, in the frames that come along or in shared memory."""

    lengths: bytes
    """[n, columns], see `Run.lengths`."""
    places: bytes
    """[n, columns, 2]: the number of the frame, or of the segment in `segments`, and bytes from its beginning."""
    segments: list[str]
    pin: int | None
    """What keeps shared memory as it is until it is Done; None for cells in frames."""


class Done(Message, frozen=True):
    """The sender needs this memory no more."""

    mutates: ClassVar[bool] = True
    pins: list[int]
    """Of reads."""
    places: list[int]
    """Reserved ones that it has not written and will not write."""


class Settle(Message, frozen=True):
    """Parts that nobody will read."""

    parts: bytes
    """[n, 3]: slot, generation, tag: parts that lost."""
    rows: bytes
    """[n, 2]: rows that left the queue, with all of their parts."""


class Inventory(Message, frozen=True):
    """Ask which parts there are."""


class Parts(Message, frozen=True):
    """Answer to Inventory."""

    parts: bytes
    """[n, 3]: slot, generation, tag."""


Request = (
    ReadTable
    | Admit
    | Withdraw
    | Claim
    | Ack
    | Nack
    | Renew
    | Advance
    | Lost
    | Stats
    | Close
    | Dismiss
    | Export
    | Release
    | Restore
    | Join
    | Written
    | Reserve
    | Write
    | Read
    | Done
    | Settle
    | Inventory
)
Answer = (
    Accepted
    | Failure
    | Table
    | Admitted
    | Withdrawn
    | Claimed
    | Groups
    | Counted
    | Exported
    | Joined
    | Reserved
    | Cells
    | Parts
)

QUEUE = Protocol(
    Request,
    Answer,
    servers="the queue's processes",
    state_hint="`tailrace queue top` shows it",
    address_hint="read the address of the one that is meant from its connection file: QueueAddress.read(path)",
)
CONTROLLER, STORAGE_UNIT = "the controller of the queue", "the storage unit of the queue"
"""What the queue's servers are called in error texts."""


def pack(numbers: IntArray | Iterable[RowId]) -> bytes:
    """Integers as they travel."""
    if isinstance(numbers, np.ndarray):
        return numbers.astype(_PACKED, copy=False).tobytes()
    return np.fromiter(chain.from_iterable(numbers), _PACKED).tobytes()


def unpack(packed: bytes, width: int) -> IntArray:
    """[n, width], read-only, without a copy.

    Raises:
        WireError: the bytes are not such an array.
    """
    if width < 1 or len(packed) % (_PACKED.itemsize * width):
        raise WireError(f"{len(packed)} bytes are not rows of {width} int64 numbers")
    return np.frombuffer(packed, dtype=_PACKED).reshape(-1, width)


def row_ids(packed: bytes) -> list[RowId]:
    """The ids in `rows [n, 2]`.

    Raises:
        WireError: as for `unpack`.
    """
    return list(map(RowId._make, unpack(packed, 2).tolist()))
