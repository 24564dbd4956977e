"""What controller, units and clients say to each other: msgpack arrays that begin with their name.

    anyone ──Hello──▶ Challenge ──Prove──▶ Welcome     at every server first; nothing else is heard before
    client ──▶ controller   Look, Admit, Withdraw, Claim, Ack, Nack, Renew, Advance, Lost, Stats, Close, Dismiss
                            Export, Release, Restore; Cancel takes back a request of its own
    client ──▶ unit         Reserve, Write, Read, Done
    unit ──▶ controller     Join, Written
    controller ──▶ unit     Settle, Inventory

A set of rows travels as packed int64, little-endian, row by row: `rows [n, 2]` is the slot and generation of n rows.
A request that `mutates` is carried out once however often it is sent: a repetition gets the first answer again.
"""

from collections.abc import Iterable
from itertools import chain
from typing import Annotated, ClassVar

import msgspec
import numpy as np
from msgspec import Meta

from tailrace import errors
from tailrace.config.columns import ColumnKind
from tailrace.errors import TailraceError, WireError
from tailrace.transfer.queue.base import QueueStats, RowId
from tailrace.transfer.queue.rows.state import ControlState
from tailrace.types import IntArray, TaskSpec

PROTOCOL = 5
"""Raised with every change of a message; only equal ones talk to each other."""
NONCE_BYTES = DIGEST_BYTES = 32
NO_VERSION = -1
"""Stands for the weight version of a row without `weight_versions`."""
NO_UNIT = -1
"""Fills up a row of unit numbers."""

Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Nonce = Annotated[bytes, Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
Digest = Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
Name = Annotated[str, Meta(min_length=1, max_length=200)]

_PACKED = np.dtype("<i8")
ROW_ID_BYTES = 2 * _PACKED.itemsize
"""Of each row's id, packed."""


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """Base of all."""

    mutates: ClassVar[bool] = False
    """Whether the server keeps the answer for a repetition, and a sender that gives up sends Cancel."""


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


# To every server


class Tell(Message, frozen=True):
    """What a server that is no queue's is asked, in words of its own: see `transfer.weights.messages`."""

    body: bytes


class Told(Message, frozen=True):
    """Answer to Tell."""

    body: bytes


class Hello(Message, frozen=True):
    """The first word of a connection."""

    client: Name
    """Unique, also among processes that have ended: what was asked under it counts once."""
    host: Name
    protocol: int
    nonce: Nonce
    """For the server to prove with that it knows the token."""


class Challenge(Message, frozen=True):
    """Answer to Hello."""

    nonce: Nonce
    """For the client."""
    proof: Digest
    """See `handshake.proof_of_server`."""


class Prove(Message, frozen=True):
    """Second word of a connection."""

    proof: Digest
    """See `handshake.proof_of_client`."""


class Look(Message, frozen=True):
    """Ask for a Welcome again: units may have joined."""


class Welcome(Message, frozen=True):
    """Answer to Prove and Look."""

    epoch: int
    """Of the server: another one says that it was started anew."""
    units: list[Unit] = []
    columns: dict[str, ColumnKind] = {}
    tasks: list[TaskSpec] = []
    recovering: bool = False
    """Of a controller that was started anew: `units` are those that have come back, and others may."""


class Beat(Message, frozen=True):
    """A sign of life, and how soon the next one will come."""

    limit_s: Seconds
    """After so long without any word the client counts as dead. One that never says this is not watched."""
    client: Name | None = None
    """Whose sign of life it is; the sender's by default."""


class Dismiss(Message, frozen=True):
    """Clients of this name have ended: what they held goes back now. Sent by who saw them end."""

    name: Name


class Cancel(Message, frozen=True):
    """The sender does not wait for one of its requests any more: forget it, or undo what it has brought about."""

    number: Count


class Accepted(Message, frozen=True):
    """Answer to all that need no other."""


class Waiting(Message, frozen=True):
    """Answer to a repetition: the request has come, and its answer will."""


class Stranger(Message, frozen=True):
    """Answer to all on a connection that has not said Hello: say it, then ask again."""


class Failure(Message, frozen=True):
    """The answer is an error."""

    kind: str
    """The name of a class in tailrace.errors."""
    text: str

    @classmethod
    def of(cls, error: TailraceError) -> "Failure":
        """The failure that says `error`; a class of elsewhere goes by its nearest base in tailrace.errors."""
        known = (base.__name__ for base in type(error).__mro__ if getattr(errors, base.__name__, None) is base)
        return cls(next(known), str(error))

    def error(self) -> TailraceError:
        """What to raise for it."""
        kind = getattr(errors, self.kind, None)
        if isinstance(kind, type) and issubclass(kind, TailraceError):
            return kind(self.text)
        return WireError(f"an error of unknown kind {self.kind!r:.80}: {self.text}")


# To the controller


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
    unwritten: bytes = b""
    """[n, 2]: rows of which the sender does not know the units, so that their outputs are nowhere: it is refused."""


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
    Hello
    | Tell
    | Prove
    | Look
    | Beat
    | Dismiss
    | Cancel
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
    Challenge
    | Told
    | Welcome
    | Accepted
    | Waiting
    | Stranger
    | Failure
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
