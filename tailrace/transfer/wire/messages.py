"""The messages of the wire itself: msgpack arrays that begin with their name.

    client ──Hello──▶ Challenge ──Prove──▶ Accepted    at every server first; nothing else is heard before
    client ──Beat, Cancel──▶ Accepted                  like the requests of a `Protocol`, which come next
    any request ──▶ Waiting, Stranger, Failure         in place of its answer

A request that `mutates` is carried out once however often it is sent: a repetition gets the first answer again.
"""

from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from tailrace import errors
from tailrace.errors import TailraceError, WireError

PROTOCOL = 7
"""Raised with every change of a message, here or in a `Protocol`; only equal ones talk to each other."""
NONCE_BYTES = DIGEST_BYTES = 32

Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Nonce = Annotated[bytes, Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
Digest = Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
Name = Annotated[str, Meta(min_length=1, max_length=200)]


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """Base of all."""

    mutates: ClassVar[bool] = False
    """Whether the server keeps the answer for a repetition, and a sender that gives up sends Cancel."""


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


class Beat(Message, frozen=True):
    """A sign of life, and how soon the next one will come."""

    limit_s: Seconds
    """After so long without any word the client counts as dead. One that never says this is not watched."""


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


WireRequest = Hello | Prove | Beat | Cancel
WireAnswer = Challenge | Accepted | Waiting | Stranger | Failure
