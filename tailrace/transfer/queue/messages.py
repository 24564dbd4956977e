"""The messages between controller, units and clients of a queue, besides those of the wire itself.

    client ──▶ controller   ReadTable, Admit, Withdraw, Claim, Ack, Nack, Renew, Remake, Advance, Lost, Stats, Close
                            Dismiss, Export, Release, Restore, Retire
    client ──▶ unit         Reserve, Write, Read, Done
    unit ──▶ controller     Join, Written
    controller ──▶ unit     Settle, Inventory, Copy
    unit ──▶ unit           Write

A set of rows travels as packed int64, little-endian, row by row: `rows [n, 2]` are the slots and generations of n rows.
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
"""The weight version of a row without `weight_versions`."""
NO_UNIT = -1
"""The number that fills up a row of unit numbers."""

_PACKED = np.dtype("<i8")
ROW_ID_BYTES = 2 * _PACKED.itemsize
"""The bytes of one packed row id."""


class Run(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Consecutive rows with cells in the same columns."""

    rows: Count
    columns: list[str]
    """The columns, in the order in which their cells lie in memory."""
    lengths: bytes
    """[rows, columns]: elements of arrays, bytes of text and JSON values, 1 for numbers."""

    def table(self) -> IntArray:
        """Return `lengths` as an array [rows, columns].

        Raises:
            WireError: `lengths` is not of that shape.
        """
        if len(self.lengths) != self.rows * len(self.columns) * _PACKED.itemsize:
            raise WireError(
                f"{len(self.lengths)} bytes are not the lengths of {self.rows} rows in {len(self.columns)} columns"
            )
        return np.frombuffer(self.lengths, dtype=_PACKED).reshape(self.rows, len(self.columns))


class Inline(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Cells that come with a message, so that they need not be fetched."""

    lengths: bytes
    """[n, columns], see `Run.lengths`."""
    starts: bytes
    """[n, columns]: bytes from the beginning of `data`."""
    data: bytes


class Unit(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A storage unit."""

    number: Count
    endpoints: list[str]
    """The endpoints at which the unit alone listens, see `at_this_server`; a client uses any of them."""
    host: str
    """The id of its host, see `host_id`. Clients on the same host share its memory."""
    directory: str
    """The directory of its shared memory's files; empty where it has no shared memory."""


# To the controller


class ReadTable(Message, frozen=True):
    """Ask for the units, columns and tasks of the queue."""


class Table(Message, frozen=True):
    """Answer to ReadTable."""

    units: list[Unit]
    columns: dict[str, ColumnKind]
    tasks: list[TaskSpec]
    recovering: bool = False
    """Whether a restarted controller still waits for units: `units` have come back, and others may."""
    gathering: list[str] = []
    """The tasks whose claims gather as many rows as their limit says."""


class Dismiss(Message, frozen=True):
    """Report that the clients of this name have ended, so that their leases and admissions end now."""

    name: Name


class Admit(Message, frozen=True):
    """Ask for room for new rows: whole groups, all or none."""

    mutates: ClassVar[bool] = True
    rows: bytes
    """[n, 3]: group_id, group_size, order."""
    versions: bytes
    """[n], the oldest weight version of each row, or NO_VERSION."""
    runs: list[Run]
    """The runs of all rows, in their order."""
    not_before: Count
    """The newest `NewRow.not_before` of the rows."""
    wait_s: Seconds
    cells: bytes | None = None
    """The parts of all rows, one after the other; given where they are so small that the controller writes them."""
    preferred: list[Count] = []
    """Units at which the sender has reserved room for the rows already."""
    full: list[Count] = []
    """Units that had no room when they were tried: any other unit is better."""


class Admitted(Message, frozen=True):
    """Answer to Admit and Restore: the client is to write the rows to `units` now."""

    rows: bytes
    """[n, 2], in the order of the request."""
    units: list[Count]
    """Each of these units gets all rows; empty where the controller has written them."""


class Withdraw(Message, frozen=True):
    """Take an admission back: the sender will not write all of its rows."""

    mutates: ClassVar[bool] = True
    rows: bytes
    """[n, 2]: all rows of one Admitted."""
    groups: bytes
    """[n]: the group_id of each row."""


class Withdrawn(Message, frozen=True):
    """Answer to Withdraw."""

    done: bool
    """True where the rows may be put again. False where they had been written and entered the queue."""


class Claim(Message, frozen=True):
    """Ask for rows under a lease."""

    mutates: ClassVar[bool] = True
    task: str
    limit: Count | None
    """The most rows that the claim may hold."""
    rank: int | None
    """The rank that claims, for policies that split batches among ranks."""
    wait_s: Seconds
    window: int | None = None
    """To one of several controllers: the last window whose rows may be handed out; see `Policy.next_window`. The answer
    is Later where its first one is beyond that. Where it has no rows of any, the claim waits for `wait_s`."""


class Later(Message, frozen=True):
    """Answer to Claim: none of this controller's rows that are to be handed out is in `Claim.window` or before it."""

    window: int | None
    """The first window that has such rows; None where there are none."""


class Claimed(Message, frozen=True):
    """Answer to Claim."""

    lease_id: int
    lease_s: float
    rows: bytes
    """[n, 4]: slot, generation, group_id, order."""
    units: bytes
    """[n, width]: the numbers of the units that have the row, the one to read from first; filled up with NO_UNIT."""
    width: Count
    columns: list[str]
    """The columns that the task reads."""
    tags: bytes
    """[n, columns]: the tag of the part that holds the valid cell."""
    cells: Inline | None = None
    """All cells, where the controller has copies of them."""
    window: Count = 0
    """The window of the run that the first row is in; see `Policy.window_of`."""


class Ack(Message, frozen=True):
    """Make the outputs under tag `lease_id` valid, and mark the rows as consumed."""

    mutates: ClassVar[bool] = True
    lease_id: int
    rows: bytes
    """[n, 2]"""
    versions: bytes
    """[n]: the oldest weight version among the outputs of each row, or NO_VERSION."""
    runs: list[Run]
    missed: list[Count]
    """Units that have some of the rows but could not be written to. They no longer count as having the rows."""


class Nack(Message, frozen=True):
    """Give rows back."""

    mutates: ClassVar[bool] = True
    lease_id: int
    rows: bytes | None
    """[n, 2]; None for all rows that are still leased, even none."""


class Renew(Message, frozen=True):
    """Restart the time limit of a lease."""

    lease_id: int
    rows: bytes = b""
    """[n, 2]: row ids that have to be under the lease."""


class Remake(Message, frozen=True):
    """Take whole groups of a lease out of the queue, to be put again with other rows."""

    mutates: ClassVar[bool] = True
    lease_id: int
    groups: bytes
    """[n]: the group_ids."""
    most: Count
    """A group that was remade so often stays under the lease."""


class Stats(Message, frozen=True):
    """Ask for the counts of the queue."""


class Counted(Message, frozen=True):
    """Answer to Stats."""

    stats: QueueStats


class Advance(Message, frozen=True):
    """Announce that the weights of this version are available."""

    version: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]


class Lost(Message, frozen=True):
    """Ask for groups that have to be put again."""

    wait_s: Seconds


class Groups(Message, frozen=True):
    """Answer to Lost and Remake."""

    ids: bytes
    """[n, 2]: group_id, and how often the group was remade."""


class Close(Message, frozen=True):
    """Close the queue for all clients."""


class Export(Message, frozen=True):
    """Ask for the present state. Its parts stay readable until Release, or until the client is gone."""

    mutates: ClassVar[bool] = True


class Exported(Message, frozen=True):
    """Answer to Export."""

    state: ControlState
    hold: int


class Release(Message, frozen=True):
    """Report that the parts of an exported state have been read."""

    mutates: ClassVar[bool] = True
    hold: int


class Restore(Message, frozen=True):
    """Ask an empty queue to take over a state. Each row is written as one part with all of its columns, under tag 0."""

    mutates: ClassVar[bool] = True
    state: ControlState


class Join(Message, frozen=True):
    """Offer a unit to the controller. A unit repeats this as a sign of life."""

    name: Name
    """The name of the unit, the same after a restart."""
    incarnation: str
    """The id of one run of the unit. It changes with a restart, and when the unit has lost parts."""
    lasting: bool
    """Whether an incarnation has what is left of the one before: if so, it is the same unit, else a new one."""
    endpoints: list[str]
    host: str
    directory: str
    max_bytes: Count
    leaving: bool = False
    """Whether the unit is to leave, so that its rows are copied to others."""


class Retire(Message, frozen=True):
    """Have a unit leave, after its rows were copied to others. It is gone when Stats no longer names it."""

    name: Name


class Joined(Message, frozen=True):
    """Answer to Join."""

    unit: Count
    columns: dict[str, ColumnKind]
    leaving: bool = False
    """Whether the unit is to leave: it says so itself from then on."""
    left: bool = False
    """Whether the unit has left, and is to end."""


class Written(Message, frozen=True):
    """Report that a unit has the parts of these rows under tag 0."""

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
    """The name of a file in the unit's directory."""
    offset: Count
    """The place in the file, in bytes from its beginning."""


class Write(Message, frozen=True):
    """Write parts of rows. Without a place, the message brings a frame for each run, with its parts in order."""

    mutates: ClassVar[bool] = True
    tag: Count
    """0 for new rows, else the lease id."""
    rows: bytes
    """[n, 2]"""
    runs: list[Run]
    place: int | None
    """The reserved place that holds the parts, one after the other."""
    told: bool = False
    """Whether the controller sent this, so that the unit need not report to it that new rows have come."""


class Read(Message, frozen=True):
    """Ask for cells. It mutates by pinning memory. An answer with frames is not kept: a repetition reads them again."""

    mutates: ClassVar[bool] = True
    rows: bytes
    """[n, 2]"""
    columns: list[str]
    tags: bytes
    """[n, columns]"""
    shared: bool
    """Whether the sender can map the unit's memory."""


class Cells(Message, frozen=True):
    """Answer to Read: the place of each cell, in the frames of this message or in shared memory."""

    lengths: bytes
    """[n, columns]; see `Run.lengths`."""
    places: bytes
    """[n, columns, 2]: the number of the frame, or of the segment in `segments`, and bytes from its beginning."""
    segments: list[str]
    pin: int | None
    """The pin that keeps shared memory unchanged until the client sends Done; None for cells in frames."""


class Done(Message, frozen=True):
    """Release memory that the sender no longer needs."""

    mutates: ClassVar[bool] = True
    pins: list[int]
    """The pins of reads."""
    places: list[int]
    """The reserved places that the sender has not written and will not write."""


class Settle(Message, frozen=True):
    """Drop parts that no client will read."""

    parts: bytes
    """[n, 3]: slot, generation and tag of parts that no longer count."""
    rows: bytes
    """[n, 2]: rows that left the queue, to be dropped with all of their parts."""


class Copy(Message, frozen=True):
    """Copy parts to another unit. The answer follows when that unit has them."""

    parts: bytes
    """[n, 3]: slot, generation and tag of each part."""
    to: Unit


class Inventory(Message, frozen=True):
    """Ask for the parts that the unit has."""


class Parts(Message, frozen=True):
    """Answer to Inventory."""

    parts: bytes
    """[n, 3]: the slot, generation and tag of each part."""


Request = (
    ReadTable
    | Admit
    | Withdraw
    | Claim
    | Ack
    | Nack
    | Renew
    | Remake
    | Advance
    | Lost
    | Stats
    | Close
    | Dismiss
    | Export
    | Release
    | Restore
    | Retire
    | Join
    | Written
    | Reserve
    | Write
    | Read
    | Done
    | Settle
    | Inventory
    | Copy
)
Answer = (
    Accepted
    | Failure
    | Table
    | Admitted
    | Withdrawn
    | Claimed
    | Later
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
"""The names of the queue's servers in error texts."""


def pack(numbers: IntArray | Iterable[RowId]) -> bytes:
    """Pack integers, or row ids, as they travel."""
    if isinstance(numbers, np.ndarray):
        return numbers.astype(_PACKED, copy=False).tobytes()
    return np.fromiter(chain.from_iterable(numbers), _PACKED).tobytes()


def unpack(packed: bytes, width: int) -> IntArray:
    """Unpack integers as an array [n, width], read-only, without a copy.

    Raises:
        WireError: the bytes are not such an array.
    """
    if width < 1 or len(packed) % (_PACKED.itemsize * width):
        raise WireError(f"{len(packed)} bytes are not rows of {width} int64 numbers")
    return np.frombuffer(packed, dtype=_PACKED).reshape(-1, width)


def row_ids(packed: bytes) -> list[RowId]:
    """Unpack the row ids in `rows [n, 2]`.

    Raises:
        WireError: as for `unpack`.
    """
    return list(map(RowId._make, unpack(packed, 2).tolist()))
