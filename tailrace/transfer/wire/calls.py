"""What a client does, as generators without I/O: each yields steps, calls to be made at once, and gets their outcomes.

    operation ──Step: calls──▶ SyncClient.run, AsyncClient.run: retries, limits ──a reply or error for each──▶ operation

An error comes as a value, beside the replies of the same step: who asks two units wants to know what became of each.

Who waits on whom: an operation on a controller that was started anew, for as long as a unit that it does not know may
still come back to it; the controller ends that by its own limit.
"""

from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from tailrace.errors import PeerLost, TailraceError, WireError
from tailrace.transfer.queue.messages import Answer, Look, Request, Unit, Welcome
from tailrace.transfer.wire.frames import Buffer, Reply
from tailrace.transfer.wire.sockets import reachable

T = TypeVar("T")
A = TypeVar("A", bound=Answer)

Outcome: TypeAlias = Reply | TailraceError

_RECOVERING_S = 0.2
"""Between questions to a controller that does not know all units again yet."""


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


class Directory:
    """Where the servers of a queue are."""

    def __init__(self, controller: str, *, dropped: Callable[[Unit], None] = lambda unit: None) -> None:
        """`controller`: its endpoint. `dropped`: a unit was forgotten, or is none (of this kind) any more."""
        self.controller = controller
        self._dropped = dropped
        self._units: dict[int, Unit] = {}

    def look(self, *, otherwise: Sequence[Call] = ()) -> Operation[Welcome]:
        """Ask the controller for units, columns and tasks."""
        welcome = yield from ask(Call(self.controller, Look()), Welcome, otherwise=otherwise)
        listed = {unit.number: unit for unit in welcome.units}
        for number, unit in list(self._units.items()):
            if unit != listed.get(number) and not (welcome.recovering and number not in listed):
                self.forget(number)
        self._units |= listed
        return welcome

    def units(
        self, numbers: Iterable[int], *, otherwise: Sequence[Call] = ()
    ) -> Operation[dict[int, Unit | TailraceError]]:
        """Units by their numbers, or why one cannot be asked. The controller is asked where one is not known."""
        numbers = list(numbers)
        wanted = set(numbers)
        if not wanted <= self._units.keys():
            welcome = yield from self.look(otherwise=otherwise)
            while welcome.recovering and not wanted <= self._units.keys():
                yield Step([], otherwise, pause_s=_RECOVERING_S)
                welcome = yield from self.look(otherwise=otherwise)
        return {number: self._find(number) for number in numbers}

    @property
    def known(self) -> Collection[Unit]:
        """The units that it knows now."""
        return self._units.values()

    def forget(self, number: int) -> None:
        """A unit did not answer: ask the controller next time, it may be elsewhere by now."""
        unit = self._units.pop(number, None)
        if unit is not None:
            self._dropped(unit)

    def _find(self, number: int) -> Unit | TailraceError:
        unit = self._units.get(number)
        if unit is None:
            return PeerLost(f"unit {number} is gone; the units of the queue are {sorted(self._units)}")
        if not reachable(unit.endpoints, unit.host):
            return WireError(f"unit {number} listens at {unit.endpoints} alone, which cannot be reached from this host")
        return unit


def endpoint(unit: Unit) -> str:
    """Where to reach a unit that a directory has found."""
    return reachable(unit.endpoints, unit.host)[0]


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


def too_late(within_s: float | None) -> PeerLost:
    """What to raise for an operation that was given up after so many seconds."""
    return PeerLost(
        f"the queue's processes have not done it within {within_s:g} s; are they still serving, on machines that are "
        f"not overloaded? `tailrace queue top` shows it"
    )
