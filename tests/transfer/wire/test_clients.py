"""Both faces of the client against a server in a process of its own."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import pytest

from tailrace.errors import LeaseError, PeerLost, QueueClosed, QueueTimeout, WireError
from tailrace.transfer.queue.base import QueueStats, RowId
from tailrace.transfer.queue.wire import calls
from tailrace.transfer.queue.wire.aio import AsyncClient
from tailrace.transfer.queue.wire.calls import Batch, Call, Directory, Found, Operation, Step
from tailrace.transfer.queue.wire.connection import Patience
from tailrace.transfer.queue.wire.messages import Beat, Claim, Claimed, Request
from tailrace.transfer.queue.wire.server import Server
from tailrace.transfer.queue.wire.sync import SyncClient
from tests.transfer.wire.desk import LIMIT_S, TOKEN, UNIT, serving
from tests.transfer.wire.rows import batch, ints

T = TypeVar("T")

PATIENT = Patience(limit_s=LIMIT_S, retry_s=0.05, max_retry_s=0.2)
HASTY = Patience(limit_s=0.1, retry_s=0.05)


class Client(Protocol):
    def run(self, operation: Operation[T]) -> T: ...

    def close(self) -> None: ...


class Awaited:
    """An `AsyncClient` that is waited for."""

    def __init__(self, name: str, token: bytes, *, patience: Patience) -> None:
        self._runner = asyncio.Runner()
        self._client = self._runner.run(self._make(name, token, patience))

    async def _make(self, name: str, token: bytes, patience: Patience) -> AsyncClient:
        return AsyncClient(name, token, patience=patience)

    def run(self, operation: Operation[T]) -> T:
        return self._runner.run(self._client.run(operation))

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
    client = face("tester", TOKEN, patience=patience)
    try:
        yield client
    finally:
        client.close()


def ask(to: str, message: Request, *, wait_s: float = 0.0) -> Operation[Any]:
    [reply] = yield Step([Call(to, message, wait_s=wait_s)])
    return reply.answer


def claim(directory: Directory, wait_s: float = LIMIT_S) -> Operation[tuple[Claimed, list[Found]]]:
    return calls.claim(directory, "actor", limit=1, rank=None, wait_s=wait_s)


@pytest.mark.parametrize("port", [0, 1], ids=["ipc", "tcp"])
def test_rows_go_from_put_to_ack(desk: Process, face: Face, port: int) -> None:
    directory = Directory(desk.endpoints[port])
    long = np.arange(200_000)
    with using(face) as client:
        ids = client.run(calls.put(directory, batch(long, ints([7, 8])), wait_s=1.0))
        assert len(ids) == 2
        for row, cell in zip(ids, (long, ints([7, 8])), strict=True):
            claimed, [found] = client.run(claim(directory))
            assert (found.unit, found.places.tolist()) == (UNIT, [0])
            np.testing.assert_array_equal(np.frombuffer(found.frames[0], dtype=np.int64), cell)
            output = batch(cell)
            outputs = {UNIT: Batch(ints([row]), output.versions, output.runs, output.frames)}
            client.run(calls.renew(directory, claimed.lease_id))
            client.run(calls.ack(directory, claimed.lease_id, outputs))
            with pytest.raises(LeaseError, match="holds nothing"):
                client.run(calls.renew(directory, claimed.lease_id))
        assert client.run(calls.stats(directory)).rows == 0


def test_a_claim_that_waits_its_limit_is_a_queue_timeout(desk: Process, face: Face) -> None:
    with using(face) as client, pytest.raises(QueueTimeout, match="a claim waited its limit"):
        client.run(claim(Directory(desk.endpoints[0]), wait_s=0.01))


def test_an_error_can_be_handled_inside_an_operation(desk: Process, face: Face) -> None:
    def careful() -> Operation[str]:
        try:
            yield from claim(Directory(desk.endpoints[0]), wait_s=0.0)
        except QueueTimeout:
            counts: QueueStats = yield from calls.stats(Directory(desk.endpoints[0]))
            return f"{counts.rows} rows"
        return "a row"

    with using(face) as client:
        assert client.run(careful()) == "0 rows"


def test_calls_of_one_step_are_made_at_once_and_an_error_of_one_cancels_the_others(desk: Process, face: Face) -> None:
    here, there = desk.endpoints

    def both() -> Operation[None]:
        yield Step([Call(here, Claim("actor", None, None, LIMIT_S), wait_s=LIMIT_S), Call(there, Beat())])

    def one_fails() -> Operation[None]:
        doomed = Call(here, Claim("actor", None, None, 0.0))
        yield Step([doomed, Call(there, Claim("actor", None, None, LIMIT_S), wait_s=LIMIT_S)])

    with using(face) as client:
        with pytest.raises(QueueTimeout):
            client.run(one_fails())
        while client.run(calls.stats(Directory(there))).blocked_puts:
            pass  # the cancelling is on its way
        client.run(calls.put(Directory(here), batch(ints([1])), wait_s=0.0))
        client.run(both())
        assert client.run(calls.stats(Directory(here))).rows == 0


def test_a_server_that_is_not_there_is_lost_after_the_limit(tmp_path: Path, face: Face) -> None:
    with using(face, HASTY) as client, pytest.raises(PeerLost, match=f"Beat to ipc://{tmp_path}/nobody had no answer"):
        client.run(ask(f"ipc://{tmp_path}/nobody", Beat()))


def test_a_server_that_stands_still_is_lost_and_heard_again_when_it_goes_on(face: Face) -> None:
    process = Process()
    try:
        with using(face) as patient, using(face, HASTY) as hasty:
            to = process.endpoints[0]
            patient.run(ask(to, Beat()))
            process.send(signal.SIGSTOP)
            with pytest.raises(PeerLost, match="Beat to ipc:"):
                hasty.run(ask(to, Beat()))
            process.send(signal.SIGCONT)
            patient.run(ask(to, Beat()))
    finally:
        process.send(signal.SIGCONT)
        process.end()


def test_a_dead_server_is_lost_and_the_next_at_its_place_is_greeted_anew(tmp_path: Path, face: Face) -> None:
    endpoint = f"ipc://{tmp_path}/desk"
    first = Process(endpoint)
    with using(face) as patient, using(face, HASTY) as hasty:
        patient.run(ask(endpoint, Beat()))
        first.end(kill=True)
        with pytest.raises(PeerLost):
            hasty.run(ask(endpoint, Beat()))
        second = Process(endpoint)
        try:
            ids = patient.run(calls.put(Directory(endpoint), batch(ints([1])), wait_s=0.0))
            assert ids == [RowId(0, 0)]
        finally:
            second.end()


def test_a_wrong_token_is_an_error(desk: Process, face: Face) -> None:
    client = face("thief", b"another token of some length", patience=PATIENT)
    try:
        with pytest.raises(WireError, match="does not know the token"):
            client.run(ask(desk.endpoints[0], Beat()))
    finally:
        client.close()


def test_a_frame_that_is_too_long_is_refused_at_once(desk: Process, face: Face) -> None:
    def heavy() -> Operation[None]:
        yield Step([Call(desk.endpoints[0], Beat(), [np.empty(2**27 + 1, dtype=np.int64).data])])

    with using(face) as client, pytest.raises(WireError, match="send fewer rows"):
        client.run(heavy())


def test_a_closed_client_does_nothing_more(desk: Process) -> None:
    client = SyncClient("tester", TOKEN)
    client.close()
    client.close()
    with pytest.raises(QueueClosed, match="this client was closed"):
        client.run(ask(desk.endpoints[0], Beat()))


async def test_a_closed_async_client_does_nothing_more(desk: Process) -> None:
    client = AsyncClient("tester", TOKEN)
    client.close()
    client.close()
    with pytest.raises(QueueClosed, match="this client was closed"):
        await client.run(ask(desk.endpoints[0], Beat()))


async def waiting(client: AsyncClient, directory: Directory, count: int) -> None:
    """Until the server has as many claims waiting."""
    while (await client.run(calls.stats(directory))).blocked_puts != count:
        pass


async def test_a_cancelled_claim_got_nothing(desk: Process) -> None:
    directory = Directory(desk.endpoints[0])
    async with asyncio.timeout(LIMIT_S), AsyncClient("tester", TOKEN) as client:
        doomed = asyncio.create_task(client.run(claim(directory)))
        await waiting(client, directory, 1)
        doomed.cancel()
        await waiting(client, directory, 0)
        assert doomed.cancelled()
        ids = await client.run(calls.put(directory, batch(ints([5])), wait_s=0.0))
        claimed, _ = await client.run(claim(directory))
        await client.run(calls.ack(directory, claimed.lease_id, {}))
        assert len(ids) == 1


async def test_a_claim_cancelled_at_any_moment_loses_no_row() -> None:
    server = Server("desk", TOKEN)
    directory = Directory(server.endpoints[0])
    with serving(server):
        async with asyncio.timeout(LIMIT_S), AsyncClient("tester", TOKEN) as client:
            await client.run(calls.put(directory, batch(ints([5])), wait_s=0.0))
            for turns in range(40):
                doomed = asyncio.create_task(client.run(claim(directory)))
                for _ in range(turns):
                    await asyncio.sleep(0)
                doomed.cancel()
                await asyncio.wait([doomed])
                if not doomed.cancelled():
                    await client.run(calls.nack(directory, doomed.result()[0].lease_id, None))
            claimed, _ = await client.run(claim(directory))
            await client.run(calls.ack(directory, claimed.lease_id, {}))


async def test_many_operations_run_at_once_on_one_connection(desk: Process) -> None:
    directory = Directory(desk.endpoints[0])
    async with asyncio.timeout(LIMIT_S), AsyncClient("tester", TOKEN) as client:
        claims = [asyncio.create_task(client.run(claim(directory))) for _ in range(50)]
        await waiting(client, directory, 50)
        await client.run(calls.put(directory, batch(*[ints([number]) for number in range(50)]), wait_s=0.0))
        found = [cells for _, [cells] in await asyncio.gather(*claims)]
        assert sorted(int(np.frombuffer(cells.frames[0], dtype=np.int64)[0]) for cells in found) == list(range(50))
        leases = [task.result()[0].lease_id for task in claims]
        await asyncio.gather(*[client.run(calls.ack(directory, lease, {})) for lease in leases])


async def test_closing_the_client_ends_what_waits(desk: Process) -> None:
    directory = Directory(desk.endpoints[0])
    async with asyncio.timeout(LIMIT_S), AsyncClient("other", TOKEN) as other:
        client = AsyncClient("tester", TOKEN)
        doomed = asyncio.create_task(client.run(claim(directory)))
        await waiting(other, directory, 1)
        client.close()
        with pytest.raises(QueueClosed, match="this client was closed"):
            await doomed
        await waiting(other, directory, 0)


def test_ctrl_c_in_a_blocking_claim_takes_it_back(desk: Process) -> None:
    directory = Directory(desk.endpoints[0])
    with using(SyncClient) as client, using(SyncClient) as other:
        client.run(calls.stats(directory))

        def interrupt() -> None:
            while other.run(calls.stats(directory)).blocked_puts != 1:
                pass
            os.kill(os.getpid(), signal.SIGINT)

        watcher = threading.Thread(target=interrupt)
        watcher.start()
        with pytest.raises(KeyboardInterrupt):
            client.run(claim(directory))
        watcher.join(LIMIT_S)
        while other.run(calls.stats(directory)).blocked_puts:
            pass
