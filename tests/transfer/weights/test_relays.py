"""Receivers that get weights from each other, and their state after one of them goes."""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from tailrace.errors import WeightsError
from tailrace.transfer.weights.chunk_server import ChunkQuestion
from tailrace.transfer.weights.download import Download
from tailrace.transfer.weights.messages import VersionGone
from tailrace.transfer.weights.receiver import WeightReceiver
from tailrace.transfer.weights.sender import WeightSender
from tailrace.transfer.wire.frames import Reply
from tests.transfer.weights.helpers import CHUNK_MIB, LIMIT_S, check, everybody_listens, tensors

ANYWHERE = ("tcp://0.0.0.0:*",)
"""An endpoint that counts as an address of the network."""


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def make_sender(stack: ExitStack, **options: Any) -> WeightSender:
    return stack.enter_context(WeightSender(chunk_mib=CHUNK_MIB, datacentre="near", **options))


def far(stack: ExitStack, sender: WeightSender, name: str, **options: Any) -> WeightReceiver:
    facts = {"medium": "tcp", "datacentre": "far", "listen": ANYWHERE}
    return stack.enter_context(WeightReceiver(sender.address, name=name, **facts | options))


@contextmanager
def on_another_host(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let receivers that are made in the block report one host, which is not the sender's."""
    with monkeypatch.context() as patch:
        patch.setattr("tailrace.transfer.weights.receiver.host_id", lambda: "the other host")
        patch.setattr("tailrace.transfer.wire.sockets.host_id", lambda: "the other host")
        yield


async def joined(sender: WeightSender, count: int) -> None:
    """Wait until there are `count` receivers."""
    wakeups = sender._service.wakeups
    assert await wakeups.wait_for(lambda: len(sender._service.receivers) == count or None, timeout_s=LIMIT_S)


class Fetching:
    """A watch on a receiver's download."""

    def __init__(self, engine: WeightReceiver) -> None:
        """Begin the watch. It must be made before anything comes."""
        service = self._service = engine._service
        arrived = service.arrived

        def watched(download: Download, *, nbytes: int, by_broadcast: bool) -> None:
            arrived(download, nbytes=nbytes, by_broadcast=by_broadcast)
            service.wakeups.notify()

        service.arrived = watched  # type: ignore[method-assign]

    async def has(self, chunks: int) -> None:
        """Wait until the receiver has `chunks` chunks of an incomplete version."""

        def look() -> bool | None:
            download = self._service._download
            stored = None if download is None else download.stored
            return (stored is not None and stored.ready >= chunks) or None

        assert await self._service.wakeups.wait_for(look, timeout_s=LIMIT_S)


async def test_a_remote_datacentre_gets_each_version_once(stack: ExitStack) -> None:
    sender = make_sender(stack)
    engines = [far(stack, sender, f"engine-{number}") for number in range(4)]
    await joined(sender, 4)
    for version in range(3):
        sender.publish(version, tensors(version).items())
        for engine in engines:
            await engine.wait(version, timeout_s=LIMIT_S)
            check(engine, version)
    stats = sender.stats()
    assert stats.bytes_sent == 3 * stats.nbytes
    assert sum(engine.stats().bytes_sent for engine in engines) == 3 * 3 * stats.nbytes
    parents = Counter(state.parent for state in stats.receivers.values())
    assert parents[""] == 1
    assert max(parents.values()) <= 2


async def test_those_on_the_host_of_a_relay_map_its_memory(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """The relay and its neighbours report one host, not the sender's, so the relay cannot map the sender's memory."""
    sender = make_sender(stack)
    with on_another_host(monkeypatch):
        engines = [far(stack, sender, f"engine-{number}", medium="auto") for number in range(3)]
        await joined(sender, 3)
        sender.publish(0, tensors(0).items())
        for engine in engines:
            await engine.wait(0, timeout_s=LIMIT_S)
            check(engine, 0)
    nbytes = sender.stats().nbytes
    assert sorted(engine.stats().bytes_received for engine in engines) == [0, 0, nbytes]
    assert sender.stats().bytes_sent == nbytes


async def test_the_neighbours_of_a_relay_whose_memory_is_gone_go_on(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = make_sender(stack)
    with on_another_host(monkeypatch):
        engines = []
        for number in range(3):
            engines.append(far(stack, sender, f"engine-{number}", medium="auto"))
            await joined(sender, number + 1)
        relay, *rest = engines
        sender.publish(0, tensors(0).items())
        for engine in engines:
            await engine.wait(0, timeout_s=LIMIT_S)
        relay.close()  # the others have mapped its memory
        for version in (1, 2):
            sender.publish(version, tensors(version).items())
            for engine in rest:
                await engine.wait(version, timeout_s=LIMIT_S)
                check(engine, version)


async def test_the_children_of_a_relay_that_left_get_another_parent(stack: ExitStack) -> None:
    sender = make_sender(stack)
    engines = [far(stack, sender, f"engine-{number}") for number in range(4)]
    await joined(sender, 4)
    sender.publish(0, tensors(0).items())
    for engine in engines:
        await engine.wait(0, timeout_s=LIMIT_S)
    first = next(engine for engine in engines if engine.stats().parent == "")
    first.close()
    rest = [engine for engine in engines if engine is not first]
    sender.publish(1, tensors(1).items())
    for engine in rest:
        await engine.wait(1, timeout_s=LIMIT_S)
        check(engine, 1)
    assert [engine.stats().parent for engine in rest].count("") == 1


async def test_a_relay_that_falls_silent_in_the_middle_is_replaced_and_its_chunks_are_kept(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = make_sender(stack, limit_s=3.0)
    first = far(stack, sender, "first", limit_s=3.0)
    await joined(sender, 1)
    second = far(stack, sender, "second", limit_s=3.0)
    await joined(sender, 2)
    enough = 3
    fetching = Fetching(second)
    answer = first._service.memory.chunk_server._chunk

    def give_a_few(stored: Any, chunk: int) -> Any:
        return answer(stored, chunk) if chunk < enough else None

    monkeypatch.setattr(first._service.memory.chunk_server, "_chunk", give_a_few)
    sender.publish(0, tensors(0).items())
    await first.wait(0, timeout_s=LIMIT_S)
    await fetching.has(enough)
    first._server.stop()  # it is silent, without a goodbye
    await second.wait(0, timeout_s=LIMIT_S)
    check(second, 0)
    nbytes = sender.stats().nbytes
    assert second.stats().bytes_received == nbytes  # no chunk came twice
    assert second.stats().parent == ""
    assert sender.stats().bytes_sent < 2 * nbytes


async def test_a_child_that_is_too_slow_for_its_relay_goes_on_with_the_newest_and_the_relay_stays_one(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = make_sender(stack)
    engines = []
    for number in range(3):
        engines.append(far(stack, sender, f"engine-{number}"))
        await joined(sender, number + 1)
    first, second, third = engines
    fetching = Fetching(second)
    answer = first._service.memory.chunk_server._chunk

    def give_one(stored: Any, chunk: int) -> Any:
        return None if stored.manifest.version == 0 and chunk > 0 else answer(stored, chunk)

    monkeypatch.setattr(first._service.memory.chunk_server, "_chunk", give_one)
    sender.publish(0, tensors(0).items())
    await fetching.has(1)
    for version in (1, 2, 3):  # the relay reuses the memory of version 0
        sender.publish(version, tensors(version).items())
        await first.wait(version, timeout_s=LIMIT_S)
    for engine in (second, third):
        await engine.wait(3, timeout_s=LIMIT_S)
        check(engine, 3)
    sent = sender.stats().bytes_sent
    sender.publish(4, tensors(4).items())
    for engine in engines:
        await engine.wait(4, timeout_s=LIMIT_S)
    stats = sender.stats()
    assert stats.bytes_sent - sent == stats.nbytes
    assert [stats.receivers[f"engine-{number}"].parent for number in range(3)] == ["", "engine-0", "engine-0"]


async def test_a_relay_that_cannot_be_reached_is_gone_round(stack: ExitStack) -> None:
    sender = make_sender(stack)
    behind = far(stack, sender, "behind a wall")
    await joined(sender, 1)
    known = list(sender._service.receivers.values())
    known[0].endpoints = ["tcp://127.0.0.1:9"]  # nothing listens there
    engine = far(stack, sender, "engine", limit_s=1.0)
    sender.publish(0, tensors(0).items())
    for each in (behind, engine):
        await each.wait(0, timeout_s=LIMIT_S)
        check(each, 0)
    assert engine.stats().parent == ""


async def test_a_relay_that_one_receiver_could_not_reach_is_trusted_again_with_a_later_version(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = make_sender(stack)
    service = sender._service
    names = ["first", "second", "third"]
    for number, name in enumerate(names, start=1):
        far(stack, sender, name)
        await joined(sender, number)
    clients = list(service.receivers)

    def parents() -> list[str]:
        return [sender.stats().receivers[name].parent for name in names]

    assert parents() == ["", "first", "first"]

    async def accuse(limit_s: float) -> None:
        """Distrust `first` on behalf of `second`, as if it could not be reached."""
        monkeypatch.setattr(service, "_limit_s", limit_s)
        sender._server.call(lambda: service._distrust(clients[1], clients[0]))
        sender._server.call(service.wakeups.notify)
        assert await service.wakeups.wait_for(lambda: sender.stats().distrusted or None, timeout_s=LIMIT_S) == ["first"]
        assert parents() == ["second", "", "second"]

    await accuse(limit_s=0.0)
    sender.publish(0, tensors(0).items())
    assert (sender.stats().distrusted, parents()) == ([], ["", "first", "first"])
    await accuse(limit_s=LIMIT_S)
    sender.publish(1, tensors(1).items())
    assert sender.stats().distrusted == ["first"]
    assert service.receivers[clients[0]].trusted_at > sender._server.now + 3 * LIMIT_S, (
        "twice as long as the first time"
    )


async def test_a_host_with_a_relay_that_another_host_could_not_reach_gets_each_version_once(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = make_sender(stack)
    with on_another_host(monkeypatch):
        neighbours = [far(stack, sender, f"engine-{number}", medium="auto") for number in range(2)]
        await joined(sender, 2)
        others = [far(stack, sender, f"other-{number}") for number in range(2)]
        await joined(sender, 4)
        relay, _, accuser, _ = sender._service.receivers
        sender._server.call(lambda: sender._service._distrust(accuser, relay))
        sender.publish(0, tensors(0).items())
        for engine in (*neighbours, *others):
            await engine.wait(0, timeout_s=LIMIT_S)
            check(engine, 0)
    nbytes = sender.stats().nbytes
    assert len(sender.stats().distrusted) == 1
    assert sorted(engine.stats().bytes_received for engine in neighbours) == [0, nbytes]


async def test_a_relay_that_does_not_give_a_version_yet_is_not_accused(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = make_sender(stack)
    first = far(stack, sender, "first")
    await joined(sender, 1)
    chunk_server = first._service.memory.chunk_server
    answer, gone = chunk_server._reply, list[ChunkQuestion]()

    def refuse_once(wanted: ChunkQuestion) -> Any:
        if not gone:
            gone.append(wanted)
            return Reply(VersionGone())
        return answer(wanted)

    monkeypatch.setattr(chunk_server, "_reply", refuse_once)
    second = far(stack, sender, "second")
    await joined(sender, 2)
    sender.publish(0, tensors(0).items())
    await second.wait(0, timeout_s=LIMIT_S)
    check(second, 0)
    assert gone
    assert sender.stats().distrusted == []
    assert sender.stats().receivers["second"].parent == "first"


async def test_the_children_of_a_relay_that_gives_a_version_up_get_it_elsewhere(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = make_sender(stack)
    first = far(stack, sender, "first")
    await joined(sender, 1)
    second = far(stack, sender, "second")
    await joined(sender, 2)

    def no_room(*_: Any, **__: Any) -> None:
        raise WeightsError("there is no room for it")

    monkeypatch.setattr(first._service.memory.pool, "take", no_room)
    sender.publish(0, tensors(0).items())
    await second.wait(0, timeout_s=LIMIT_S)
    check(second, 0)
    with pytest.raises(WeightsError, match="no room"):
        await first.wait(0, timeout_s=LIMIT_S)
    assert sender.stats().distrusted == ["first"]


async def test_a_receiver_without_an_address_of_the_network_does_not_relay(stack: ExitStack) -> None:
    sender = make_sender(stack)
    engines = [far(stack, sender, f"engine-{number}", listen=("tcp://127.0.0.1:*",)) for number in range(3)]
    await joined(sender, 3)
    sender.publish(0, tensors(0).items())
    for engine in engines:
        await engine.wait(0, timeout_s=LIMIT_S)
        assert engine.stats().parent == ""


async def test_a_version_that_is_begun_after_another_is_said_to_be_read(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = make_sender(stack)
    engine = far(stack, sender, "engine")
    await joined(sender, 1)
    fetching = Fetching(engine)
    service, is_slow = sender._service, threading.Event()
    answer = service.chunk_server._chunk

    def give_slowly(stored: Any, chunk: int) -> Any:
        """Give the first chunk of version 0 at once, the rest after version 1 is announced, and none of version 1."""
        is_given = chunk == 0 or not is_slow.is_set()
        return answer(stored, chunk) if stored.manifest.version == 0 and is_given else None

    monkeypatch.setattr(service.chunk_server, "_chunk", give_slowly)
    is_slow.set()
    sender.publish(0, tensors(0).items())
    await fetching.has(1)
    sender.publish(1, tensors(1).items())
    await everybody_listens(sender)
    is_slow.clear()
    sender._server.call(service.chunk_server.answer_waiting)
    (known,) = service.receivers.values()
    reads_it = lambda: known.progress.reading == 2 or None  # noqa: E731
    assert await service.wakeups.wait_for(reads_it, timeout_s=LIMIT_S)


async def test_a_slow_reader_finishes_its_version_and_goes_on_with_the_newest(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = make_sender(stack)
    engine = far(stack, sender, "slow")
    await joined(sender, 1)
    came: list[int] = []
    fetching = Fetching(engine)
    answer = sender._service.chunk_server._chunk

    def publish_more(stored: Any, chunk: int) -> Any:
        """Give the first chunk of version 0 at once, and the others when version 3 is published."""
        wait = stored.manifest.version == 0 and chunk > 0 and sender.stats().version != 3
        return None if wait else answer(stored, chunk)

    monkeypatch.setattr(sender._service.chunk_server, "_chunk", publish_more)
    sender.publish(0, tensors(0).items())
    await fetching.has(1)
    for version in (1, 2, 3):
        sender.publish(version, tensors(version).items())
    sender._server.call(sender._service.chunk_server.answer_waiting)
    while not came or came[-1] < 3:
        came.append(await engine.wait(came[-1] + 1 if came else 0, timeout_s=LIMIT_S))
        check(engine, came[-1])
    assert came in ([0, 3], [3])
    assert engine.stats().bytes_received == 2 * sender.stats().nbytes
