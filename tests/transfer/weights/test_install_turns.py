"""Turns to install a version: one engine at a time, in the order of asking, whatever happens to the others."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, closing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.errors import SenderLost, WeightsError
from tailrace.transfer.weights.install_turns import InstallTurns
from tailrace.transfer.weights.receiver import WeightReceiver
from tailrace.transfer.weights.sender import WeightSender
from tailrace.transfer.weights.threads import Wakeups
from tailrace.transfer.wire.server import Ticket
from tests.transfer.weights.helpers import LIMIT_S, everybody_listens
from tests.transfer.weights.peer import Peer, hold


class Place:
    """A sender whose line of turns is watched, and receivers that want turns."""

    def __init__(self, stack: ExitStack, *, limit_s: float = 10.0) -> None:
        self.stack = stack
        self.sender = stack.enter_context(WeightSender(limit_s=limit_s))
        self._limit_s = limit_s
        self._wakeups = Wakeups()
        line = self.sender._service._turns
        for name in ("request", "end"):
            self._watch(line, name)
        self._line = line

    def _watch(self, line: InstallTurns, name: str) -> None:
        method = getattr(line, name)

        def watched(*args: object) -> None:
            method(*args)
            self._wakeups.notify()

        setattr(line, name, watched)

    def receiver(self, name: str) -> WeightReceiver:
        return self.stack.enter_context(WeightReceiver(self.sender.address, name=name, limit_s=self._limit_s))

    async def in_line(self, count: int) -> None:
        """Wait until `count` receivers want or have a turn."""
        found = await self._wakeups.wait_for(lambda: len(self._line._requests) == count or None, timeout_s=LIMIT_S)
        assert found, f"{len(self._line._requests)} are in line, not {count}"


@pytest.fixture
def place() -> Iterator[Place]:
    with ExitStack() as stack:
        yield Place(stack)


class Engine:
    """An engine that takes a turn in the background, and keeps it until it is told to leave."""

    def __init__(self, receiver: WeightReceiver) -> None:
        self.has_it = asyncio.Event()
        self._may_leave = asyncio.Event()
        self._receiver = receiver
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        async with self._receiver.turn():
            self.has_it.set()
            await self._may_leave.wait()

    async def gets_it(self) -> None:
        await asyncio.wait_for(self.has_it.wait(), LIMIT_S)

    async def leave(self) -> None:
        self._may_leave.set()
        await asyncio.wait_for(self.task, LIMIT_S)


@asynccontextmanager
async def line_of(place: Place, count: int) -> AsyncIterator[list[Engine]]:
    """Engines that have asked one after the other. The first has its turn."""
    engines = []
    for number in range(count):
        engines.append(Engine(place.receiver(f"engine-{number}")))
        await place.in_line(number + 1)
    await engines[0].gets_it()
    try:
        yield engines
    finally:
        for engine in engines:
            engine.task.cancel()
        await asyncio.gather(*(engine.task for engine in engines), return_exceptions=True)


async def test_turns_come_one_at_a_time_in_the_order_of_asking(place: Place) -> None:
    async with line_of(place, 4) as engines:
        for number, engine in enumerate(engines):
            await engine.gets_it()
            assert [other.has_it.is_set() for other in engines] == [before <= number for before in range(4)]
            await engine.leave()
        await place.in_line(0)


async def test_a_turn_is_given_back_by_a_block_that_raises(place: Place) -> None:
    receiver = place.receiver("engine")
    with pytest.raises(ZeroDivisionError):
        async with receiver.turn():
            raise ZeroDivisionError
    await place.in_line(0)


async def test_one_receiver_may_take_turn_after_turn(place: Place) -> None:
    receiver = place.receiver("engine")
    for _ in range(3):
        async with receiver.turn():
            await place.in_line(1)


async def test_who_is_cancelled_while_waiting_is_out_of_the_line(place: Place) -> None:
    async with line_of(place, 3) as (holder, cancelled, last):
        cancelled.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled.task
        await place.in_line(2)
        assert not last.has_it.is_set()
        await holder.leave()
        await last.gets_it()


async def test_a_closed_sender_ends_the_wait_of_those_in_line(place: Place) -> None:
    async with line_of(place, 2) as (_, waiting):
        await everybody_listens(place.sender)
        place.sender.close()
        with pytest.raises(SenderLost, match="closed"):
            await waiting.task


async def test_a_closed_receiver_gives_its_turn_back_and_ends_its_wait(place: Place) -> None:
    async with line_of(place, 3) as (holder, waiting, last):
        waiting._receiver.close()
        with pytest.raises(WeightsError, match="this receiver of weights was closed"):
            await waiting.task
        holder._receiver.close()
        await last.gets_it()


async def test_the_turn_of_an_engine_that_is_killed_goes_to_the_next() -> None:
    with ExitStack() as stack:
        place = Place(stack, limit_s=3.0)
        dead = stack.enter_context(closing(Peer(hold, name="dead", limit_s=3.0)))
        dead.pipe.send(place.sender.address)
        assert await dead.hear() == "has the turn"
        engine = Engine(place.receiver("alive"))
        await place.in_line(2)
        assert not engine.has_it.is_set()
        dead.kill()
        await engine.gets_it()
        await engine.leave()


async def test_an_engine_that_connects_again_in_its_turn_keeps_it() -> None:
    with ExitStack() as stack:
        place = Place(stack, limit_s=3.0)
        async with line_of(place, 2) as (holder, waiting):
            sender, receiver = place.sender._service, holder._receiver._service
            before = next(iter(sender.receivers))
            receiver.server.call(lambda: receiver.sender.lose(SenderLost("the link is down")))
            forgotten = lambda: None if before in sender.receivers else True  # noqa: E731
            assert await sender.wakeups.wait_for(forgotten, timeout_s=LIMIT_S)
            await place.in_line(2)
            assert not waiting.has_it.is_set()
            await holder.leave()
            await waiting.gets_it()


steps = st.lists(st.tuples(st.sampled_from(["ask", "end", "leave"]), st.integers(0, 5)), max_size=40)


@given(steps)
def test_however_requests_come_and_go_the_first_of_those_left_alone_has_the_turn(steps: list[tuple[str, int]]) -> None:
    """Three clients make two requests each. A request that is repeated has come by another connection."""
    answered: list[Ticket] = []
    line = InstallTurns(answered.append)
    expected: list[int] = []
    open_tickets: dict[int, Ticket] = {}
    for number, (what, which) in enumerate(steps):
        if what == "ask":
            if which not in expected:
                expected.append(which)
            open_tickets[which] = Ticket(f"client {which % 3}", number)
            line.request(f"turn {which}", open_tickets[which])
        elif what == "end":
            line.end(f"turn {which}")
            expected = [turn for turn in expected if turn != which]
        else:
            line.forget_client(f"client {which % 3}")
            expected = [turn for turn in expected if turn % 3 != which % 3]
        assert list(line._requests) == [f"turn {turn}" for turn in expected]
        waiting = {open_tickets[turn] for turn in expected[1:]}
        assert not waiting & set(answered), "only the first may know that it has the turn"
        assert not expected or open_tickets[expected[0]] in answered
        assert len(answered) == len(set(answered))
