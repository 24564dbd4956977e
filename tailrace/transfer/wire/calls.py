"""What a client does, as generators without I/O: each yields steps, calls to be made at once, and gets their outcomes.

    operation ──Step: calls──▶ SyncClient.run, AsyncClient.run: retries, limits ──a reply or error for each──▶ operation

An error comes as a value, beside the replies of the same step: who asks two servers wants to know what became of each.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from tailrace.errors import TailraceError, WireError
from tailrace.transfer.wire.frames import Buffer, Reply
from tailrace.transfer.wire.messages import Message

T = TypeVar("T")
A = TypeVar("A", bound=Message)

Outcome: TypeAlias = Reply | TailraceError


@dataclass(frozen=True, slots=True)
class Call:
    """A request to one server."""

    to: str
    """Its endpoint."""
    message: Message
    frames: Sequence[Buffer] = ()
    """Not changed before the reply is there."""
    wait_s: float = 0.0
    """How long the server may wait for what was asked, beyond the time that any answer may take."""


Meanwhile: TypeAlias = Callable[[], object]


def wait() -> None:
    """Nothing else is to be done until the calls have their outcomes."""


@dataclass(frozen=True, slots=True)
class Step:
    """Calls made at once."""

    calls: Sequence[Call]
    otherwise: Sequence[Call] = ()
    """Sent where the operation is broken off in this step (cancelled, Ctrl-C, too late); nobody waits for answers."""
    pause_s: float = 0.0
    """Seconds that pass before the calls."""
    meanwhile: Meanwhile = wait
    """Called when the calls are on their way, so that the servers and this process work at once. Raises nothing."""


Operation: TypeAlias = Generator[Step, list[Outcome], T]
Beside: TypeAlias = Callable[[], Sequence[Call]]
"""What else is to be told, asked before each step of an operation and at its end; nobody waits for the answers."""


def nothing() -> Sequence[Call]:
    """See `Beside`."""
    return ()


def ask(call: Call, kind: type[A], *, otherwise: Sequence[Call] = ()) -> Operation[A]:
    """The answer to one call.

    Raises:
        TailraceError: what came instead; WireError for an answer of another kind.
    """
    [outcome] = yield Step([call], otherwise)
    return expect(outcome, kind)


def expect(outcome: Outcome, kind: type[A]) -> A:
    """The answer, which must be of this kind.

    Raises:
        TailraceError: the outcome is an error; WireError for an answer of another kind.
    """
    if isinstance(outcome, TailraceError):
        raise outcome
    if not isinstance(outcome.answer, kind):
        raise WireError(f"got the answer {type(outcome.answer).__name__}, expected {kind.__name__}")
    return outcome.answer
