"""The messages between sender, receivers and relays, beside those of the wire itself.

    receiver ──▶ sender    GetPlan, ReportProgress, ReportParent, Leave, TakeTurn, EndTurn
    receiver ──▶ parent    GetManifest, GetSums, GetChunk    the parent is the sender, or a receiver that relays

Each may arrive twice without harm: it asks a question or states a fact. Sums are 64-bit xxh3.
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
"""The serial that stands for no version; serials count from 1."""
NO_VERSION = -1
FOREVER_S = 1e9
"""The time limit of a question whose answer may take any time: the peer gives signs of life meanwhile."""


class ReceiverProgress(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The progress of a receiver."""

    reading: Count
    """The serial of the version that is being fetched, or NOTHING."""
    received: int
    """The newest whole version, or NO_VERSION."""
    installed: int
    nbytes: Count
    """Bytes of weights that have come over the network."""


class GetPlan(Message, frozen=True):
    """Ask for the plan as soon as it differs from that of `epoch`."""

    epoch: Count
    name: Annotated[str, Meta(max_length=200)]
    """A name for people to read."""
    host: Name
    """See `host_id`. A receiver that must not share memory gives a host that no other process has."""
    datacentre: Annotated[str, Meta(max_length=200)]
    endpoints: Endpoints
    """The endpoints at which the receiver relays."""
    backend: Backend | None
    """The backend of the process group that the receiver would join; None for no group."""
    progress: ReceiverProgress


class ReportProgress(Message, frozen=True):
    """Report the receiver's progress."""

    progress: ReceiverProgress


class ReportParent(Message, frozen=True):
    """Report that a parent does not answer, or that this receiver cannot serve a version that it has."""

    parent: Annotated[str, Meta(max_length=200)]
    """The parent's name; empty for the receiver itself."""


class Leave(Message, frozen=True):
    """Report that the receiver is closing."""


class TakeTurn(Message, frozen=True):
    """Ask for the turn to install a version. Turns are granted in the order of the requests."""

    turn: Name
    """The name of this request; no other request has it."""


class EndTurn(Message, frozen=True):
    """Give a turn back, or withdraw the request for it."""

    turn: Name


class VersionOffer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A version that receivers can fetch."""

    serial: Count
    version: int
    manifest: Sum
    """The sum of the encoded manifest."""
    seal: Sum | None
    """The sum of the manifest's sum and the sums of all chunks; None while the version is being written."""


class Membership(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A member's place in a process group, whose rank 0 is the sender."""

    name: Name
    """The group's name; no other group has it, and only its members know it."""
    backend: Backend
    host: Annotated[str, Meta(max_length=300)]
    """The sender's address, where the members find each other."""
    port: Annotated[int, Meta(ge=1, le=65535)]
    rank: Count
    size: Count


class Broadcast(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A version that is being broadcast to a group, chunk by chunk."""

    serial: Count
    nbytes: Annotated[int, Meta(ge=0, le=2**48)]
    chunk_bytes: Annotated[int, Meta(ge=1, le=MAX_FRAME_BYTES)]
    sums: bytes
    """The sums of all chunks, packed."""


class Plan(Message, frozen=True):
    """Answer to GetPlan."""

    epoch: Count
    offers: list[VersionOffer]
    """The versions on offer, the newest last. Receivers finish an older one that they have begun, but begin none."""
    parent: str
    """The parent's name; empty for the sender."""
    endpoints: Endpoints
    host: str
    membership: Membership | None
    """The receiver's place in the group that exists or is being formed."""
    promised: Count
    """The serial of the version that members will get by a broadcast if nothing fails, or NOTHING."""
    broadcast: Broadcast | None
    """The version that is being broadcast to the group now; None for a receiver without a membership."""


class SenderClosed(Message, frozen=True):
    """Answer to GetPlan: the sender has closed."""


class GetManifest(Message, frozen=True):
    """Ask for a manifest and the place of its chunks."""

    serial: Count


class ManifestReply(Message, frozen=True):
    """Answer to GetManifest."""

    manifest: bytes
    segment: str
    """The path of the shared memory with the chunks."""


class GetSums(Message, frozen=True):
    """Ask for the sums of the chunks from `have` on, as soon as the first `want` chunks are there."""

    serial: Count
    have: Count
    want: Count


class SumsReply(Message, frozen=True):
    """Answer to GetSums."""

    sums: bytes
    """The sums, packed."""


class GetChunk(Message, frozen=True):
    """Ask for a chunk, as soon as it is there."""

    serial: Count
    chunk: Count


class ChunkReply(Message, frozen=True):
    """Answer to GetChunk; the chunk's bytes follow as a frame."""

    sum: Sum


class VersionGone(Message, frozen=True):
    """Answer to GetManifest, GetSums and GetChunk: this process does not serve the version, or no longer."""


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
"""An answer with its frame, if any; or the error that took its place."""


def ask(
    link: Connection, endpoint: str, question: WeightsQuestion, then: Callable[[AnswerOrError], None], *, wait: bool
) -> None:
    """Ask a peer, and call `then` with the answer or the error.

    `wait`: the answer may take any time, as long as the peer gives signs of life.
    """

    def heard(outcome: Outcome) -> None:
        match outcome:
            case QueueClosed():
                pass  # this side closed the link
            case TailraceError() as error:
                then(error)
            case Reply(answer, frames):
                then((answer, memoryview(frames[0]) if frames else None))

    link.start(Call(endpoint, question, wait_s=FOREVER_S if wait else 0.0), heard)


def error_in(heard: AnswerOrError) -> TailraceError | None:
    """Return the error that took the place of an answer, if there is one."""
    return heard if isinstance(heard, TailraceError) else None


def version_or_none(version: int) -> WeightVersion | None:
    """The version that a message names; None for NO_VERSION."""
    return None if version == NO_VERSION else version
