"""Both clients, blocking and asynchronous, against a server in a process of its own."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
import pytest

from tailrace.errors import LeaseError, PeerLost, QueueClosed, QueueTimeout, WireError
from tailrace.transfer.queue.base import RowId
from tailrace.transfer.queue.messages import QUEUE, Claim, Claimed, Nack
from tailrace.transfer.wire import protocol as wire
from tailrace.transfer.wire.aio import AsyncClient
from tailrace.transfer.wire.calls import Beside, Call, Operation, Outcome, Step, ask, expect, nothing
from tailrace.transfer.wire.connection import Patience
from tailrace.transfer.wire.frames import Reply
from tailrace.transfer.wire.messages import Accepted, Beat, Message
from tailrace.transfer.wire.server import Server
from tailrace.transfer.wire.sync import SyncClient
from tests.transfer.wire import talk
from tests.transfer.wire.desk import LIMIT_S, TOKEN, serving
from tests.transfer.wire.rows import ints

T = TypeVar("T")

PATIENT = Patience(limit_s=LIMIT_S, retry_s=0.05, max_retry_s=0.2)
HASTY = Patience(limit_s=0.1, retry_s=0.05)


class Client(Protocol):
    def run(self, operation: Operation[T], *, within_s: float | None = None, beside: Beside = nothing) -> T: ...

    def close(self) -> None: ...


class Awaited:
    """An `AsyncClient` whose calls block."""

    def __init__(self, name: str, token: bytes, protocol: wire.Protocol, *, patience: Patience) -> None:
        self._runner = asyncio.Runner()
        self._client = self._runner.run(self._make(name, token, protocol, patience))

    async def _make(self, name: str, token: bytes, protocol: wire.Protocol, patience: Patience) -> AsyncClient:
        return AsyncClient(name, token, protocol, patience=patience)

    def run(self, operation: Operation[T], *, within_s: float | None = None, beside: Beside = nothing) -> T:
        return self._runner.run(self._client.run(operation, within_s=within_s, beside=beside))

    def close(self) -> None:
        self._client.close()
        self._runner.close()


Face = Callable[..., Client]


@pytest.fixture(params=[SyncClient, Awaited], ids=["sync", "async"])
def face(request: pytest.FixtureRequest) -> Face:
    made: Face = request.param
    return made


class Process:
    """A desk in a process of its own."""

    def __init__(self, *endpoints: str) -> None:
        command = [sys.executable, "-m", "tests.transfer.wire.desk", TOKEN.decode(), *endpoints]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.endpoints = self._process.stdout.readline().split()

    def send(self, number: signal.Signals) -> None:
        os.kill(self._process.pid, number)

    def end(self, *, kill: bool = False) -> None:
        self.send(signal.SIGKILL if kill else signal.SIGTERM)
        self._process.wait(LIMIT_S)
        assert self._process.stdout is not None
        self._process.stdout.close()


@pytest.fixture(scope="module")
def desk() -> Iterator[Process]:
    process = Process()
    yield process
    process.end()


@contextmanager
def using(face: Face, patience: Patience = PATIENT) -> Iterator[Client]:
    client = face("tester", TOKEN, QUEUE, patience=patience)
    try:
        yield client
    finally:
        client.close()


def says(to: str, message: Message) -> Operation[None]:
    yield from ask(Call(to, message), Accepted)


@pytest.mark.parametrize("port", [0, 1], ids=["ipc", "tcp"])
def test_rows_go_from_put_to_ack(desk: Process, face: Face, port: int) -> None:
    to = desk.endpoints[port]
    long = np.arange(200_000)
    with using(face) as client:
        assert len(client.run(talk.put(to, long, ints([7, 8])))) == 2
        for cell in (long, ints([7, 8])):
            lease, found = client.run(talk.claim(to))
            np.testing.assert_array_equal(found, cell)
            client.run(talk.renew(to, lease))
            client.run(talk.ack(to, lease))
            with pytest.raises(LeaseError, match="holds nothing"):
                client.run(talk.renew(to, lease))
        assert client.run(talk.stats(to)).rows == 0


def test_a_claim_that_waits_its_limit_is_a_queue_timeout(desk: Process, face: Face) -> None:
    with using(face) as client, pytest.raises(QueueTimeout, match="a claim waited its limit"):
        client.run(talk.claim(desk.endpoints[0], wait_s=0.01))


def test_an_error_is_raised_inside_the_operation_that_asked(desk: Process, face: Face) -> None:
    def careful() -> Operation[str]:
        try:
            yield from talk.claim(desk.endpoints[0], wait_s=0.0)
        except QueueTimeout:
            return f"{(yield from talk.stats(desk.endpoints[0])).rows} rows"
        return "a row"

    with using(face) as client:
        assert client.run(careful()) == "0 rows"


def test_calls_of_one_step_are_made_at_once_and_each_has_its_own_outcome(desk: Process, face: Face) -> None:
    here, there = desk.endpoints
    too_long = np.empty(2**27 + 1, dtype=np.int64).data

    def several() -> Operation[list[Outcome]]:
        beat = Beat(1.0)
        calls = [Call(here, Claim("actor", None, None, 0.0)), Call(there, beat), Call(here, beat, [too_long])]
        return (yield Step(calls))

    with using(face) as client:
        late, well, refused = client.run(several())
        assert isinstance(late, QueueTimeout)
        assert isinstance(well, Reply)
        assert isinstance(refused, WireError)
        assert "send fewer rows" in str(refused)


@pytest.fixture(scope="module")
def pair(desk: Process) -> Iterator[tuple[str, str]]:
    """The endpoints of two desks."""
    other = Process()
    yield desk.endpoints[0], other.endpoints[0]
    other.end()


def claims_at(*desks: str, limit_s: float | None = None) -> Operation[list[Outcome]]:
    """Claim a row at the desk that has one first."""
    calls = [Call(to, Claim("actor", 1, None, LIMIT_S), wait_s=LIMIT_S) for to in desks]
    return (yield Step(calls, first=True, limit_s=limit_s))


def rows_at(client: Client, *desks: str) -> list[int]:
    """The rows that wait at each desk, once no claim waits there."""
    stats = [client.run(talk.stats(to)) for to in desks]
    return rows_at(client, *desks) if any(one.blocked_puts for one in stats) else [one.rows for one in stats]


def test_the_first_reply_ends_a_step_and_the_other_calls_are_taken_back(pair: tuple[str, str], face: Face) -> None:
    with using(face) as client:
        client.run(talk.put(pair[1], ints([1])))
        late, won = client.run(claims_at(*pair))
        assert isinstance(late, QueueTimeout)
        assert isinstance(won, Reply)
        assert rows_at(client, *pair) == [0, 0]
        client.run(talk.ack(pair[1], expect(won, Claimed).lease_id))


def test_a_lease_that_is_granted_besides_the_first_one_is_given_back(pair: tuple[str, str], face: Face) -> None:
    with using(face) as client:
        for to in pair:
            client.run(talk.put(to, ints([1])))
        outcomes = client.run(claims_at(*pair))
        [(place, won)] = [(place, one) for place, one in enumerate(outcomes) if isinstance(one, Reply)]
        client.run(talk.ack(pair[place], expect(won, Claimed).lease_id))
        lease, _ = client.run(talk.claim(pair[1 - place]))
        client.run(talk.ack(pair[1 - place], lease))
        assert rows_at(client, *pair) == [0, 0]


def test_an_error_does_not_end_a_step_that_waits_for_the_first_reply(pair: tuple[str, str], face: Face) -> None:
    def waiting() -> Operation[list[Outcome]]:
        refused = Call(pair[0], Claim("actor", 1, None, 0.0))
        want = Call(pair[1], Claim("actor", 1, None, LIMIT_S), wait_s=LIMIT_S)
        return (yield Step([refused, want], first=True, meanwhile=threading.Thread(target=put).start))

    def put() -> None:
        with SyncClient("beside", TOKEN, QUEUE) as beside:
            beside.run(talk.put(pair[1], ints([1])))

    with using(face) as client:
        late, won = client.run(waiting())
        assert isinstance(late, QueueTimeout)
        assert isinstance(won, Reply)
        client.run(talk.ack(pair[1], expect(won, Claimed).lease_id))


def test_a_step_ends_at_its_limit_and_what_it_waits_for_is_taken_back(pair: tuple[str, str], face: Face) -> None:
    with using(face) as client:
        outcomes = client.run(claims_at(*pair, limit_s=0.05))
        assert [type(outcome) for outcome in outcomes] == [QueueTimeout, QueueTimeout]
        assert rows_at(client, *pair) == [0, 0]


def test_what_is_done_meanwhile_is_done_when_the_calls_are_on_their_way(desk: Process, face: Face) -> None:
    here = desk.endpoints[0]

    def waiting(beside: Client) -> Operation[list[Outcome]]:
        want = Call(here, Claim("actor", None, None, LIMIT_S), wait_s=LIMIT_S)
        return (yield Step([want], meanwhile=lambda: beside.run(talk.put(here, ints([1])))))

    with SyncClient("beside", TOKEN, QUEUE) as beside, using(face) as client:
        client.run(says(here, Beat(1.0)))  # the client is connected then, and sends at once
        [claimed] = client.run(waiting(beside))
        assert isinstance(claimed, Reply)
        assert isinstance(claimed.answer, Claimed)


def test_an_operation_that_is_too_late_is_given_up_and_told_so(desk: Process, face: Face) -> None:
    to = desk.endpoints[0]

    def slow(lease: int) -> Operation[None]:
        yield Step(
            [Call(to, Claim("actor", None, None, LIMIT_S), wait_s=LIMIT_S)], otherwise=[Call(to, Nack(lease, None))]
        )

    with using(face) as client:
        client.run(talk.put(to, ints([1])))
        lease, _ = client.run(talk.claim(to))
        with pytest.raises(PeerLost, match=r"have not done it within 0\.5 s"):
            client.run(slow(lease), within_s=0.5)
        lease, _ = client.run(talk.claim(to))
        client.run(talk.ack(to, lease))
        while client.run(talk.stats(to)).blocked_puts:
            pass  # the cancellation is on its way


def test_what_is_due_is_told_before_each_step_and_at_the_end(desk: Process, face: Face) -> None:
    to = desk.endpoints[0]
    leases: list[int] = []

    def leasing() -> Operation[int]:
        lease, _ = yield from talk.claim(to)
        leases.append(lease)
        again, _ = yield from talk.claim(to)  # the row of the first lease, which is given back meanwhile
        leases.append(again)
        return again

    def due() -> list[Call]:
        return [Call(to, Nack(leases.pop(), None)) for _ in list(leases)]

    with using(face) as client:
        client.run(talk.put(to, ints([1])))
        client.run(leasing(), beside=due)
        lease, _ = client.run(talk.claim(to))
        client.run(talk.ack(to, lease))


async def close_while_waiting(to: str) -> None:
    async with AsyncClient("closing", TOKEN, QUEUE) as client:
        await client.run(talk.put(to, ints([1])))
        lease, _ = await client.run(talk.claim(to))

        def waiting() -> Operation[None]:
            want = Call(to, Claim("actor", None, None, LIMIT_S), wait_s=LIMIT_S)
            yield Step([want], otherwise=[Call(to, Nack(lease, None))])

        task = asyncio.create_task(client.run(waiting()))
        while not (await client.run(talk.stats(to))).blocked_puts:
            pass
    with suppress(QueueClosed):
        await task


def test_what_a_client_was_doing_when_it_is_closed_is_broken_off(desk: Process) -> None:
    to = desk.endpoints[0]
    asyncio.run(close_while_waiting(to))
    with using(SyncClient) as client:
        lease, _ = client.run(talk.claim(to))
        client.run(talk.ack(to, lease))


def test_a_pause_comes_before_the_calls(desk: Process, face: Face) -> None:
    def pausing() -> Operation[list[Outcome]]:
        return (yield Step([Call(desk.endpoints[0], Beat(1.0))], pause_s=0.01))

    with using(face) as client:
        [outcome] = client.run(pausing())
        assert isinstance(outcome, Reply)
        with pytest.raises(PeerLost):
            client.run(never(), within_s=0.01)


def never() -> Operation[None]:
    yield Step([], pause_s=LIMIT_S)


def test_a_server_that_is_not_there_is_lost_after_the_limit(tmp_path: Path, face: Face) -> None:
    with using(face, HASTY) as client, pytest.raises(PeerLost, match=f"ipc://{tmp_path}/nobody did not answer"):
        client.run(says(f"ipc://{tmp_path}/nobody", Beat(1.0)))


def test_a_server_that_stands_still_is_lost_and_heard_again_when_it_goes_on(face: Face) -> None:
    process = Process()
    try:
        with using(face) as patient, using(face, HASTY) as hasty:
            to = process.endpoints[0]
            patient.run(says(to, Beat(1.0)))
            process.send(signal.SIGSTOP)
            with pytest.raises(PeerLost, match=r"the server at ipc:.* did not answer within"):
                hasty.run(says(to, Beat(1.0)))
            process.send(signal.SIGCONT)
            patient.run(says(to, Beat(1.0)))
    finally:
        process.send(signal.SIGCONT)
        process.end()


def test_a_dead_server_is_lost_and_the_next_at_its_place_is_greeted_anew(tmp_path: Path, face: Face) -> None:
    endpoint = f"ipc://{tmp_path}/desk"
    first = Process(endpoint)
    with using(face) as patient, using(face, HASTY) as hasty:
        patient.run(says(endpoint, Beat(1.0)))
        first.end(kill=True)
        with pytest.raises(PeerLost):
            hasty.run(says(endpoint, Beat(1.0)))
        second = Process(endpoint)
        try:
            ids = patient.run(talk.put(endpoint, ints([1])))
            assert ids == [RowId(0, 0)]
        finally:
            second.end()


def test_a_wrong_token_is_an_error(desk: Process, face: Face) -> None:
    client = face("thief", b"another token of some length", QUEUE, patience=PATIENT)
    try:
        with pytest.raises(WireError, match="does not know the token"):
            client.run(says(desk.endpoints[0], Beat(1.0)))
    finally:
        client.close()


def test_a_closed_client_does_nothing_more(desk: Process) -> None:
    client = SyncClient("tester", TOKEN, QUEUE)
    client.close()
    client.close()
    with pytest.raises(QueueClosed, match="this client was closed"):
        client.run(says(desk.endpoints[0], Beat(1.0)))


async def test_a_closed_async_client_does_nothing_more(desk: Process) -> None:
    client = AsyncClient("tester", TOKEN, QUEUE)
    client.close()
    client.close()
    with pytest.raises(QueueClosed, match="this client was closed"):
        await client.run(says(desk.endpoints[0], Beat(1.0)))


async def waiting(client: AsyncClient, to: str, count: int) -> None:
    """Wait until `count` claims wait at the server."""
    while (await client.run(talk.stats(to))).blocked_puts != count:
        pass


async def test_a_cancelled_claim_got_nothing(desk: Process) -> None:
    to = desk.endpoints[0]
    async with asyncio.timeout(LIMIT_S), AsyncClient("tester", TOKEN, QUEUE) as client:
        doomed = asyncio.create_task(client.run(talk.claim(to)))
        await waiting(client, to, 1)
        doomed.cancel()
        await waiting(client, to, 0)
        assert doomed.cancelled()
        ids = await client.run(talk.put(to, ints([5])))
        lease, _ = await client.run(talk.claim(to))
        await client.run(talk.ack(to, lease))
        assert len(ids) == 1


async def test_a_claim_cancelled_at_any_moment_loses_no_row() -> None:
    server = Server("desk", TOKEN, QUEUE)
    to = server.endpoints[0]
    with serving(server):
        async with asyncio.timeout(LIMIT_S), AsyncClient("tester", TOKEN, QUEUE) as client:
            await client.run(talk.put(to, ints([5])))
            for turns in range(40):
                doomed = asyncio.create_task(client.run(talk.claim(to)))
                for _ in range(turns):
                    await asyncio.sleep(0)
                doomed.cancel()
                await asyncio.wait([doomed])
                if not doomed.cancelled():
                    await client.run(talk.nack(to, doomed.result()[0]))
            lease, _ = await client.run(talk.claim(to))
            await client.run(talk.ack(to, lease))


async def test_many_operations_run_at_once_on_one_connection(desk: Process) -> None:
    to = desk.endpoints[0]
    async with asyncio.timeout(LIMIT_S), AsyncClient("tester", TOKEN, QUEUE) as client:
        claims = [asyncio.create_task(client.run(talk.claim(to))) for _ in range(50)]
        await waiting(client, to, 50)
        await client.run(talk.put(to, *[ints([number]) for number in range(50)]))
        found = [cell for _, cell in await asyncio.gather(*claims)]
        assert sorted(int(cell[0]) for cell in found) == list(range(50))
        leases = [task.result()[0] for task in claims]
        await asyncio.gather(*[client.run(talk.ack(to, lease)) for lease in leases])


async def test_closing_the_client_ends_what_waits(desk: Process) -> None:
    to = desk.endpoints[0]
    async with asyncio.timeout(LIMIT_S), AsyncClient("other", TOKEN, QUEUE) as other:
        client = AsyncClient("tester", TOKEN, QUEUE)
        doomed = asyncio.create_task(client.run(talk.claim(to)))
        await waiting(other, to, 1)
        client.close()
        with pytest.raises(QueueClosed, match="this client was closed"):
            await doomed
        await waiting(other, to, 0)


def test_ctrl_c_in_a_blocking_claim_takes_it_back(desk: Process) -> None:
    to = desk.endpoints[0]
    with using(SyncClient) as client, using(SyncClient) as other:
        client.run(talk.stats(to))

        def interrupt() -> None:
            while other.run(talk.stats(to)).blocked_puts != 1:
                pass
            os.kill(os.getpid(), signal.SIGINT)

        watcher = threading.Thread(target=interrupt)
        watcher.start()
        with pytest.raises(KeyboardInterrupt):
            client.run(talk.claim(to))
        watcher.join(LIMIT_S)
        while other.run(talk.stats(to)).blocked_puts:
            pass
