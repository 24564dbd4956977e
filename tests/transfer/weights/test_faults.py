"""Networks that corrupt, truncate and cut, and processes that are killed: a version arrives whole or not at all."""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tailrace.activity import Activity
from tailrace.engine.backends.fake import FakeEngine, RandomPlaywright
from tailrace.errors import SenderLost
from tailrace.events import EventLog
from tailrace.rollout.updater import EngineUpdater
from tailrace.transfer.weights.receiver import WeightReceiver
from tailrace.transfer.weights.sender import WeightSender
from tests.transfer.remote.proxy import Proxy
from tests.transfer.weights.helpers import CHUNK_MIB, LIMIT_S, check, error_of, everybody_listens, tensors
from tests.transfer.weights.peer import Peer, receive, send, shared

TCP = ("tcp://127.0.0.1:*",)


class SpoilingProxy(Proxy):
    """A proxy that changes pieces of what the server sends."""

    spoil: Callable[[bytes], bytes] = staticmethod(lambda piece: piece)

    async def _pass_on(self, reader: Any, writer: Any, then: Any) -> None:
        from_server = then != self._after_request

        class Reader:
            async def read(_, count: int) -> bytes:
                piece: bytes = await reader.read(count)
                return self.spoil(piece) if from_server and piece else piece

        await super()._pass_on(Reader(), writer, then)  # type: ignore[arg-type]


@contextmanager
def behind_a_proxy(**options: Any) -> Iterator[tuple[WeightSender, SpoilingProxy]]:
    with (
        WeightSender(chunk_mib=CHUNK_MIB, listen=TCP, **options) as sender,
        SpoilingProxy(sender.address.endpoints[0]) as proxy,
    ):
        sender.address = msgspec.structs.replace(sender.address, endpoints=[proxy.endpoint])
        sender._service.address = sender.address
        yield sender, proxy
        sender.close()


def spoiler(change: Callable[[bytes], bytes], *, every: int, times: int) -> tuple[Callable[[bytes], bytes], list[int]]:
    """A function that changes every `every`-th full piece, which lies within a chunk, and a list of those changed."""
    seen, done = 0, list[int]()

    def spoil(piece: bytes) -> bytes:
        nonlocal seen
        seen += len(piece) == 4096
        if len(piece) == 4096 and seen % every == 0 and len(done) < times:
            done.append(seen)
            return change(piece)
        return piece

    return spoil, done


def flip(piece: bytes) -> bytes:
    return piece[:2000] + bytes([piece[2000] ^ 4]) + piece[2001:]


@pytest.mark.parametrize("change", [flip, lambda piece: piece[:-700]], ids=["corrupted", "truncated"])
async def test_what_a_network_spoils_is_fetched_again(change: Callable[[bytes], bytes]) -> None:
    with (
        behind_a_proxy() as (sender, proxy),
        WeightReceiver(sender.address, name="engine", medium="tcp", limit_s=1.0) as engine,
    ):
        proxy.spoil, done = spoiler(change, every=7, times=4)
        for version in range(3):
            sender.publish(version, tensors(version, scale=4).items())
            for _ in range(5):  # a broken connection is given up after `limit_s`
                try:
                    await engine.wait(version, timeout_s=LIMIT_S)
                    break
                except SenderLost:
                    continue
            check(engine, version, scale=4)
        assert len(done) == 4
        assert sender.stats().bytes_sent > 3 * sender.stats().nbytes


async def comes(engine: WeightReceiver, version: int) -> None:
    """Wait for a version as an engine does. The receiver may lose and find its sender meanwhile."""
    async with asyncio.timeout(LIMIT_S):
        while engine.received != version:
            try:
                await engine.wait(version, timeout_s=LIMIT_S)
            except SenderLost:
                await engine.heard(timeout_s=LIMIT_S)


async def test_connections_that_are_lost_cost_time_alone() -> None:
    with (
        behind_a_proxy() as (sender, proxy),
        WeightReceiver(sender.address, name="engine", medium="tcp", limit_s=2.0) as engine,
    ):
        proxy.worsen(delay_s=0.0, cut_every=60)
        for version in range(3):
            sender.publish(version, tensors(version, scale=4).items())
            await comes(engine, version)
            check(engine, version, scale=4)
        assert proxy.cuts > 0


async def test_a_receiver_that_was_away_catches_up_with_the_newest() -> None:
    with (
        behind_a_proxy(limit_s=0.5) as (sender, proxy),
        WeightReceiver(sender.address, name="engine", medium="tcp", limit_s=0.5) as engine,
    ):
        sender.publish(0, tensors(0).items())
        await engine.wait(0, timeout_s=LIMIT_S)
        proxy.worsen(delay_s=0.0, cut_every=1)  # nothing passes any more
        waiting = asyncio.create_task(engine.wait(1, timeout_s=LIMIT_S))
        with pytest.raises(SenderLost, match="did not answer"):
            await waiting
        await sender.installed(1, timeout_s=LIMIT_S)  # the sender does not wait for it
        assert sender.stats().receivers == {}
        for version in (1, 2, 3):
            sender.publish(version, tensors(version).items())
        proxy.worsen(delay_s=0.0, cut_every=0)
        await comes(engine, 3)
        check(engine, 3)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def start(stack: ExitStack, role: Callable[..., None], **options: Any) -> Peer:
    process = Peer(role, **options)
    stack.callback(process.close)
    return process


async def test_a_sender_that_is_killed_ends_the_wait_and_leaves_nothing(stack: ExitStack, tmp_path: Path) -> None:
    process = start(stack, send, directory=tmp_path)
    address = await process.hear()
    with WeightReceiver(address, name="engine", limit_s=2.0, directory=tmp_path) as engine:
        process.pipe.send(0)
        await engine.wait(0, timeout_s=LIMIT_S)
        assert shared(tmp_path) == 2
        process.kill()
        with pytest.raises(SenderLost, match="is lost"):
            await engine.wait(1, timeout_s=LIMIT_S)
        assert shared(tmp_path) == 1, "the receiver has its own alone"
        check(engine, 0)  # what is mapped stays mapped
    assert list(tmp_path.iterdir()) == []
    with WeightSender(directory=tmp_path):  # the next to listen removes the sockets of dead processes
        path = Path(address.endpoints[0].removeprefix("ipc://"))
        assert not path.exists()


async def test_an_engine_goes_on_after_a_trainer_was_silent_for_longer_than_a_receiver_believes_in_it(
    stack: ExitStack,
) -> None:
    """The trainer's step may be so long that none of its threads runs. The driver's limit is the longer one."""
    process = start(stack, send)
    receiver = stack.enter_context(WeightReceiver(await process.hear(), name="engine", limit_s=0.5))
    log = EventLog(sinks=())
    executor = stack.enter_context(ThreadPoolExecutor(1))
    engine = FakeEngine(executor=executor, playwright=RandomPlaywright(50))
    updater = EngineUpdater(
        engine, receiver, "in_flight", log=log, activity=Activity(log, "rollout"), timeout_s=LIMIT_S
    )
    updating = asyncio.create_task(updater.run())
    wakeups = receiver._service.wakeups
    for version in (1, 2):
        process.pipe.send(version)
        async with asyncio.timeout(LIMIT_S), updater.generating(version):
            assert updater.version == version
        os.kill(process.pid, signal.SIGSTOP)
        assert await wakeups.wait_for(lambda: error_of(receiver), timeout_s=LIMIT_S)
        os.kill(process.pid, signal.SIGCONT)
    assert not updating.done()
    updating.cancel()
    await asyncio.wait([updating])


async def test_a_receiver_that_connects_anew_does_not_wait_for_the_one_it_was(stack: ExitStack) -> None:
    """The receiver took its sender for lost, but the sender did not notice."""
    sender = stack.enter_context(WeightSender(limit_s=10 * LIMIT_S))
    receiver = stack.enter_context(WeightReceiver(sender.address, name="engine", medium="tcp", limit_s=3.0))
    await everybody_listens(sender)
    service = receiver._service
    for version in range(3):  # their names decide which of the old and the new one is the other's child
        before = service.sender._link
        service.server.call(lambda: service.sender.lose(SenderLost("it was silent")))
        is_back = lambda: (  # noqa: E731
            (service.sender._link not in (None, before) and error_of(receiver) is None) or None  # noqa: B023
        )
        assert await service.wakeups.wait_for(is_back, timeout_s=LIMIT_S)
        sender.publish(version, tensors(version).items())
        assert await receiver.wait(version, timeout_s=LIMIT_S) == version
        check(receiver, version)
        receiver.installed(version)
        await sender.installed(version, timeout_s=LIMIT_S)


async def test_a_sender_killed_in_the_middle_of_a_version_leaves_receivers_with_a_whole_one(
    stack: ExitStack, tmp_path: Path
) -> None:
    process = start(stack, send, scale=400, directory=tmp_path)
    address = await process.hear()
    with WeightReceiver(address, name="engine", limit_s=2.0, directory=tmp_path, medium="tcp") as engine:
        process.pipe.send(0)
        await engine.wait(0, timeout_s=LIMIT_S)
        process.pipe.send(1)
        await engine.announcement(1, timeout_s=LIMIT_S)
        assert engine.announced == 1
        process.kill()
        with pytest.raises(SenderLost):
            await engine.wait(2, timeout_s=LIMIT_S)
        assert engine.received is not None
        check(engine, engine.received, scale=400)


@pytest.mark.parametrize("medium", ["auto", "tcp"])
async def test_a_receiver_that_is_killed_holds_nobody_up(stack: ExitStack, tmp_path: Path, medium: str) -> None:
    with WeightSender(chunk_mib=CHUNK_MIB, limit_s=1.0, directory=tmp_path) as sender:
        process = start(stack, receive, name="engine", versions=9, medium=medium, directory=tmp_path)
        process.pipe.send(sender.address)
        sender.publish(0, tensors(0).items())
        assert (await process.hear())[0] == 0
        waiting = asyncio.create_task(sender.installed(1, timeout_s=LIMIT_S))
        process.kill()
        await waiting
        assert sender.stats().receivers == {}
        for version in range(1, 5):
            sender.publish(version, tensors(version).items())
        assert shared(sender._pool.directory) <= 2, "what the dead one had mapped is used again"
    with WeightSender(directory=tmp_path):
        assert shared(tmp_path) == 1, "the directory of the dead one is gone"


async def test_a_stopped_receiver_is_forgotten_and_comes_back(stack: ExitStack) -> None:
    with WeightSender(chunk_mib=CHUNK_MIB, limit_s=0.5) as sender:
        process = start(stack, receive, name="engine", versions=2)
        process.pipe.send(sender.address)
        sender.publish(0, tensors(0).items())
        assert (await process.hear())[0] == 0
        os.kill(process.pid, signal.SIGSTOP)
        await sender.installed(5, timeout_s=LIMIT_S)
        sender.publish(5, tensors(5).items())
        os.kill(process.pid, signal.SIGCONT)
        assert (await process.hear())[0] == 5
