"""The messages of the wire itself: msgpack arrays that begin with their name.

    client ──Hello──▶ Challenge ──Prove──▶ Accepted    first, at every server; no other message counts before
    client ──Beat, Cancel──▶ Accepted                  after that, like the requests of a `Protocol`
    any request ──▶ Waiting, Stranger, Failure         in place of its answer

A request that `mutates` is carried out once however often it is sent: a repetition gets the first answer again.
"""

from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from tailrace import errors
from tailrace.errors import TailraceError, WireError

PROTOCOL = 10
"""The version of all messages, here and in each `Protocol`: raise it with every change. Both sides must be equal."""
NONCE_BYTES = DIGEST_BYTES = 32

Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Nonce = Annotated[bytes, Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
Digest = Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
NAME_CHARS = 200
Name = Annotated[str, Meta(min_length=1, max_length=NAME_CHARS)]


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """The base of all messages."""

    mutates: ClassVar[bool] = False
    """Whether the server keeps the answer for a repetition. A sender that gives up then sends Cancel."""


class Hello(Message, frozen=True):
    """The first message of a connection."""

    client: Name
    """A unique name, also among processes that have ended: each request under it counts once."""
    host: Name
    protocol: int
    nonce: Nonce
    """The nonce with which the server proves that it knows the token."""


class Challenge(Message, frozen=True):
    """Answer to Hello."""

    server: Name
    """The server's id, see `Authenticator.server`."""
    nonce: Nonce
    """The nonce with which the client proves that it knows the token."""
    proof: Digest
    """See `handshake.proof_of_server`."""


class Prove(Message, frozen=True):
    """The second message of a connection."""

    proof: Digest
    """See `handshake.proof_of_client`."""


class Beat(Message, frozen=True):
    """A sign of life, and the time limit for the next one."""

    limit_s: Seconds
    """Seconds without a message after which the client counts as dead. A client that sends no Beat is not watched."""


class Cancel(Message, frozen=True):
    """Ask to forget a request that the sender no longer waits for, or to undo its effects."""

    number: Count


class Accepted(Message, frozen=True):
    """Answer to all requests that need no other."""


class Waiting(Message, frozen=True):
    """Answer to a repetition: the request has come, and its answer will follow."""


class Stranger(Message, frozen=True):
    """Answer to any request on a connection that has not said Hello: say it, then ask again."""


class Failure(Message, frozen=True):
    """Answer that is an error."""

    kind: str
    """The name of a class in tailrace.errors."""
    text: str

    @classmethod
    def of(cls, error: TailraceError) -> "Failure":
        """Make the failure for `error`; a class from elsewhere is named by its nearest base in tailrace.errors."""
        known = (base.__name__ for base in type(error).__mro__ if getattr(errors, base.__name__, None) is base)
        return cls(next(known), str(error))

    def error(self) -> TailraceError:
        """Make the error to raise for this failure."""
        kind = getattr(errors, self.kind, None)
        if isinstance(kind, type) and issubclass(kind, TailraceError):
            return kind(self.text)
        return WireError(f"an error of unknown kind {self.kind!r:.80}: {self.text}")


WireRequest = Hello | Prove | Beat | Cancel
WireAnswer = Challenge | Accepted | Waiting | Stranger | Failure
