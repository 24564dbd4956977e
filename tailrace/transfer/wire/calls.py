"""A client's operations, as generators without I/O: each yields steps of concurrent calls, and gets their outcomes.

    operation ──Step: calls──▶ SyncClient.run, AsyncClient.run: retries, limits ──a reply or error for each──▶ operation

An error comes as a value, beside the replies of the same step: an operation that asks two servers needs both outcomes.
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
    """The server's endpoint."""
    message: Message
    frames: Sequence[Buffer] = ()
    """Frames that must not change before the reply is there."""
    wait_s: float = 0.0
    """Seconds that the server may wait before it answers, beyond the time that any answer may take."""


Meanwhile: TypeAlias = Callable[[], object]


def wait() -> None:
    """Do nothing: no other work is due until the calls have their outcomes."""


@dataclass(frozen=True, slots=True)
class Step:
    """Concurrent calls."""

    calls: Sequence[Call]
    otherwise: Sequence[Call] = ()
    """Calls to send, without waiting for answers, if the operation is broken off here (cancelled, Ctrl-C, too late)."""
    pause_s: float = 0.0
    """Seconds to wait before the calls."""
    meanwhile: Meanwhile = wait
    """Called when the calls are on their way, so that servers and this process work at once. It must not raise."""
    first: bool = False
    """Whether the first reply ends the step. Errors do not, unless every call has one."""
    limit_s: float | None = None
    """Seconds after which the step ends in any case. Calls without an outcome at the end are taken back, and a
    QueueTimeout is their outcome."""


Operation: TypeAlias = Generator[Step, list[Outcome], T]
Beside: TypeAlias = Callable[[], Sequence[Call]]
"""Returns further calls to send, before each step of an operation and at its end. Their answers are not awaited."""


def nothing() -> Sequence[Call]:
    """Return no calls; see `Beside`."""
    return ()


def ask(call: Call, kind: type[A], *, otherwise: Sequence[Call] = ()) -> Operation[A]:
    """Make one call, and return its answer.

    Raises:
        TailraceError: the error that came instead; WireError for an answer of another kind.
    """
    [outcome] = yield Step([call], otherwise)
    return expect(outcome, kind)


def expect(outcome: Outcome, kind: type[A]) -> A:
    """Return the answer of an outcome, which must be of this kind.

    Raises:
        TailraceError: the outcome is an error; WireError for an answer of another kind.
    """
    if isinstance(outcome, TailraceError):
        raise outcome
    if not isinstance(outcome.answer, kind):
        raise WireError(f"got the answer {type(outcome.answer).__name__}, expected {kind.__name__}")
    return outcome.answer
