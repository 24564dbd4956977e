"""What sender, receivers and relays say to each other, beside the messages of the wire itself.

    receiver ──▶ sender    GetPlan, ReportProgress, ReportParent, Leave, TakeTurn, EndTurn
    receiver ──▶ parent    GetManifest, GetSums, GetChunk    the parent is the sender, or a receiver that relays

All of them may come twice: they ask, or they say how things are. Sums are xxh3 of 64 bits.
"""

from collections.abc import Callable
from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from tailrace.errors import QueueClosed, TailraceError
from tailrace.transfer.wire.calls import Call, Outcome
from tailrace.transfer.wire.connection import Connection
from tailrace.transfer.wire.frames import MAX_FRAME_BYTES, Reply
from tailrace.transfer.wire.messages import Accepted, Count, Message, Name
from tailrace.transfer.wire.protocol import Protocol
from tailrace.types import WeightVersion

SUM_BYTES = 8
Sum = Annotated[bytes, Meta(min_length=SUM_BYTES, max_length=SUM_BYTES)]
Endpoints = Annotated[list[Annotated[str, Meta(max_length=300)]], Meta(max_length=16)]
Backend = Literal["gloo", "nccl"]
NOTHING = 0
"""Stands for the serial of no version: serials count from 1."""
NO_VERSION = -1
FOREVER_S = 1e9
"""What a question may wait for its answer: the peer gives signs of life meanwhile."""


class ReceiverProgress(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How far a receiver is."""

    reading: Count
    """The serial of the version that it fetches now, or NOTHING."""
    received: int
    """Its newest whole version, or NO_VERSION."""
    installed: int
    nbytes: Count
    """Bytes of weights that have come over the network."""


class GetPlan(Message, frozen=True):
    """Ask for the plan, once it is another than that of `epoch`."""

    epoch: Count
    name: Annotated[str, Meta(max_length=200)]
    """For people."""
    host: Name
    """See `host_id`; one of its own for a receiver that must not share memory."""
    datacentre: Annotated[str, Meta(max_length=200)]
    endpoints: Endpoints
    """Where it relays."""
    backend: Backend | None
    """Of the process group that it would be a member of."""
    progress: ReceiverProgress


class ReportProgress(Message, frozen=True):
    """Tell how far the sender of this is."""

    progress: ReceiverProgress


class ReportParent(Message, frozen=True):
    """A parent does not answer, or this receiver has a version that it cannot give."""

    parent: Annotated[str, Meta(max_length=200)]
    """Its name; empty for the receiver's own."""


class Leave(Message, frozen=True):
    """The receiver is closed."""


class TakeTurn(Message, frozen=True):
    """Ask for the turn to install a version, once all that asked before have had theirs."""

    turn: Name
    """Of this request for a turn alone."""


class EndTurn(Message, frozen=True):
    """Give a turn back, or do not want it any more."""

    turn: Name


class VersionOffer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A version that can be had."""

    serial: Count
    version: int
    manifest: Sum
    """Of the encoded manifest."""
    seal: Sum | None
    """Of the manifest's sum and those of all chunks; None while it is being written."""


class Membership(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A member's place in a process group, whose rank 0 is the sender."""

    name: Name
    """Of this group alone; only its members know it."""
    backend: Backend
    host: Annotated[str, Meta(max_length=300)]
    """Of the sender, where the members find each other."""
    port: Annotated[int, Meta(ge=1, le=65535)]
    rank: Count
    size: Count


class Broadcast(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A version that is being broadcast to a group, chunk by chunk."""

    serial: Count
    nbytes: Annotated[int, Meta(ge=0, le=2**48)]
    chunk_bytes: Annotated[int, Meta(ge=1, le=MAX_FRAME_BYTES)]
    sums: bytes
    """Of all chunks, packed."""


class Plan(Message, frozen=True):
    """Answer to GetPlan."""

    epoch: Count
    offers: list[VersionOffer]
    """The newest last; older ones are finished by those that are at it, and not begun."""
    parent: str
    """Its name; empty for the sender."""
    endpoints: Endpoints
    host: str
    membership: Membership | None
    """In the group that there is, or that is being formed."""
    promised: Count
    """The serial of a version that those with a membership get by a broadcast, if nothing goes wrong, or NOTHING."""
    broadcast: Broadcast | None
    """What is being broadcast now, for those with a membership."""


class SenderClosed(Message, frozen=True):
    """Answer to GetPlan: the sender was closed."""


class GetManifest(Message, frozen=True):
    """Ask for a manifest, and where its chunks lie."""

    serial: Count


class ManifestReply(Message, frozen=True):
    """Answer to GetManifest."""

    manifest: bytes
    segment: str
    """The path of the shared memory with the chunks."""


class GetSums(Message, frozen=True):
    """Ask for the sums of the chunks from `have` on, once the first `want` are there."""

    serial: Count
    have: Count
    want: Count


class SumsReply(Message, frozen=True):
    """Answer to GetSums."""

    sums: bytes
    """Packed."""


class GetChunk(Message, frozen=True):
    """Ask for a chunk, once it is there."""

    serial: Count
    chunk: Count


class ChunkReply(Message, frozen=True):
    """Answer to GetChunk; the bytes come along as a frame."""

    sum: Sum


class VersionGone(Message, frozen=True):
    """Answer to GetManifest, GetSums and GetChunk: this version cannot be had here (any more)."""


WeightsQuestion = (
    GetPlan | ReportProgress | ReportParent | Leave | TakeTurn | EndTurn | GetManifest | GetSums | GetChunk
)
WeightsAnswer = Accepted | Plan | SenderClosed | ManifestReply | SumsReply | ChunkReply | VersionGone

WEIGHTS = Protocol(
    WeightsQuestion,
    WeightsAnswer,
    servers="the processes that have the weights",
    state_hint="",
    address_hint="read the address of the one that is meant: WeightSender.address",
)

AnswerOrError: TypeAlias = tuple[Message, memoryview | None] | TailraceError
"""An answer and the frame that came along, or what took its place."""


def ask(
    link: Connection, endpoint: str, question: WeightsQuestion, then: Callable[[AnswerOrError], None], *, wait: bool
) -> None:
    """Ask a peer; `then` gets what it says. `wait`: the answer may take as long as it likes, with signs of life."""

    def heard(outcome: Outcome) -> None:
        match outcome:
            case QueueClosed():
                pass  # the link was closed here, by who asked
            case TailraceError() as error:
                then(error)
            case Reply(answer, frames):
                then((answer, memoryview(frames[0]) if frames else None))

    link.start(Call(endpoint, question, wait_s=FOREVER_S if wait else 0.0), heard)


def error_in(heard: AnswerOrError) -> TailraceError | None:
    """What took the place of an answer, if anything did."""
    return heard if isinstance(heard, TailraceError) else None


def version_or_none(version: int) -> WeightVersion | None:
    """A version as a message says it; None for NO_VERSION."""
    return None if version == NO_VERSION else version
