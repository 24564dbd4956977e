"""Versions that are broadcast to a process group of gloo, and the recovery when the group breaks."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from tailrace.errors import ConfigError, WeightsError
from tailrace.events import Event, EventLog
from tailrace.transfer.weights.media import process_group
from tailrace.transfer.weights.media.process_group import ProcessGroup
from tailrace.transfer.weights.receiver import WeightReceiver
from tailrace.transfer.weights.sender import WeightSender
from tests.transfer.weights.helpers import CHUNK_MIB, LIMIT_S, check, grouped, tensors
from tests.transfer.weights.peer import Peer, receive, send

SHORT_S = 4.0
"""A short limit, whose end tests wait for."""


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def make_sender(stack: ExitStack, **options: Any) -> WeightSender:
    return stack.enter_context(WeightSender(**{"chunk_mib": CHUNK_MIB} | options))


def member(stack: ExitStack, sender: WeightSender, name: str, **options: Any) -> WeightReceiver:
    return stack.enter_context(WeightReceiver(sender.address, name=name, medium="gloo", **options))


def process(stack: ExitStack, sender: WeightSender, name: str, *, versions: int, **options: Any) -> Peer:
    peer = Peer(receive, name=name, medium="gloo", versions=versions, **options)
    stack.callback(peer.close)
    peer.pipe.send(sender.address)
    return peer


async def give(sender: WeightSender, version: int, *engines: WeightReceiver, **what: Any) -> None:
    sender.publish(version, tensors(version, scale=what.get("scale", 1)).items())
    for engine in engines:
        assert await engine.wait(version, timeout_s=LIMIT_S) == version
        check(engine, version, **what)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
async def test_versions_arrive_bit_for_bit_by_broadcasts_alone(
    stack: ExitStack, count: int, dtype: torch.dtype | None
) -> None:
    events: list[Event] = []
    log = EventLog(sinks=(events.append,))
    sender = make_sender(stack, dtype=dtype)
    names = [f"engine-{number}" for number in range(count)]
    engines = [member(stack, sender, name, log=log) for name in names]
    await grouped(sender, *names)
    for version in range(4):
        await give(sender, version, *engines, scale=3, dtype=dtype)
    nbytes = sender.stats().nbytes
    assert (sender.stats().bytes_sent, sender.stats().bytes_broadcast) == (0, 4 * nbytes)
    for engine in engines:
        assert engine.stats().bytes_received == engine.stats().bytes_broadcast == 4 * nbytes
    assert {event.info["medium"] for event in events} == {"gloo"}
    assert all(event.metrics["broadcast_bytes"] == event.metrics["network_bytes"] == nbytes for event in events)


async def test_the_last_of_versions_that_come_faster_than_they_are_broadcast_arrives(stack: ExitStack) -> None:
    sender = make_sender(stack)
    engine = member(stack, sender, "engine")
    await grouped(sender, "engine")
    for version in range(20):
        sender.publish(version, tensors(version).items())
    came = 0
    while came < 19:
        came = await engine.wait(came + 1, timeout_s=LIMIT_S)
        check(engine, came)


async def test_who_joins_later_is_in_the_next_group(stack: ExitStack) -> None:
    sender = make_sender(stack)
    first = member(stack, sender, "first")
    await grouped(sender, "first")
    await give(sender, 0, first)
    second = member(stack, sender, "second")
    await second.wait(0, timeout_s=LIMIT_S)
    check(second, 0)
    await grouped(sender, "first", "second")
    await give(sender, 1, first, second)
    nbytes = sender.stats().nbytes
    assert first.stats().bytes_broadcast == 2 * nbytes
    assert (second.stats().bytes_received, second.stats().bytes_broadcast) == (2 * nbytes, nbytes)


async def test_other_media_and_a_group_serve_one_sender(stack: ExitStack) -> None:
    sender = make_sender(stack)
    one, other = member(stack, sender, "one"), member(stack, sender, "other")
    mapped = stack.enter_context(WeightReceiver(sender.address, name="mapped"))
    copied = stack.enter_context(WeightReceiver(sender.address, name="copied", medium="tcp"))
    await grouped(sender, "one", "other")
    for version in range(3):
        await give(sender, version, one, other, mapped, copied)
    nbytes = sender.stats().nbytes
    assert (sender.stats().bytes_sent, sender.stats().bytes_broadcast) == (3 * nbytes, 3 * nbytes)
    assert mapped.stats().bytes_received == 0


async def test_a_group_is_of_one_datacentre_and_others_get_each_version_once(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = make_sender(stack, datacentre="near")
    listen = ("tcp://0.0.0.0:*",)  # counts as an address of the network
    with monkeypatch.context() as patch:
        patch.setattr("tailrace.transfer.weights.receiver.host_id", lambda: "the other host")
        far = [member(stack, sender, f"far-{number}", datacentre="far", listen=listen) for number in range(2)]
    near = [member(stack, sender, f"near-{number}", datacentre="near") for number in range(2)]
    await grouped(sender, "near-0", "near-1")
    for version in range(2):
        await give(sender, version, *near, *far)
    nbytes = sender.stats().nbytes
    assert (sender.stats().bytes_sent, sender.stats().bytes_broadcast) == (2 * nbytes, 2 * nbytes)


async def test_a_chunk_that_is_broadcast_corrupt_is_fetched(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    sender = make_sender(stack)
    engine = member(stack, sender, "engine")
    await grouped(sender, "engine")
    broadcast, seen = ProcessGroup.broadcast, 0

    def spoil(self: ProcessGroup, data: torch.Tensor) -> None:
        nonlocal seen
        broadcast(self, data)
        if self._rank:
            seen += 1
            data[17] ^= seen == 3

    monkeypatch.setattr(ProcessGroup, "broadcast", spoil)
    await give(sender, 0, engine)
    chunk, nbytes = int(CHUNK_MIB * 2**20), sender.stats().nbytes
    assert sender.stats().bytes_sent == chunk
    assert engine.stats().bytes_broadcast == nbytes - chunk
    await give(sender, 1, engine)
    assert sender.stats().bytes_sent == chunk


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_member_that_falls_silent_holds_up_the_others_for_the_limit_and_they_form_another_group(
    stack: ExitStack, number: signal.Signals
) -> None:
    sender = make_sender(stack, limit_s=SHORT_S)
    names = ["one", "two", "three"]
    peers = [process(stack, sender, name, versions=99, scale=30, limit_s=SHORT_S) for name in names]
    await grouped(sender, *names)

    async def hear(version: int, *those: Peer) -> list[int]:
        """The bytes that each of `those` has received for `version`."""
        said = [await peer.hear() for peer in those]
        assert [number for number, _ in said] == [version] * len(those)
        return [nbytes for _, nbytes in said]

    for version in range(3):
        sender.publish(version, tensors(version, scale=30).items())
        await hear(version, *peers)
    assert sender.stats().bytes_sent == 0
    sender.publish(3, tensors(3, scale=30).items())
    os.kill(peers[1].pid, number)
    rest = [peers[0], peers[2]]
    await hear(3, *rest)
    for version in range(4, 7):
        sender.publish(version, tensors(version, scale=30).items())
        await hear(version, *rest)
    await grouped(sender, "one", "three")
    before = sender.stats()
    sender.publish(7, tensors(7, scale=30).items())
    await hear(7, *rest)
    assert sender.stats().bytes_sent == before.bytes_sent
    assert sender.stats().bytes_broadcast == before.bytes_broadcast + before.nbytes


async def test_a_receiver_whose_groups_broke_again_and_again_takes_part_in_the_next(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = make_sender(stack)
    engine = member(stack, sender, "engine")
    broadcast = ProcessGroup.broadcast

    def fail(self: ProcessGroup, data: torch.Tensor) -> None:
        if self._rank:
            raise WeightsError("a member is lost")
        broadcast(self, data)

    group = None
    with monkeypatch.context() as patch:
        patch.setattr(ProcessGroup, "broadcast", fail)
        for version in range(6):
            group = await grouped(sender, "engine", after=group)
            await give(sender, version, engine)
    await grouped(sender, "engine", after=group)
    before = sender.stats()
    await give(sender, 6, engine)
    assert sender.stats().bytes_sent == before.bytes_sent


async def test_a_version_that_is_published_while_a_group_forms_does_not_form_it_again(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    gather, published, formed = process_group._gather, threading.Event(), []

    def gather_later(store: Any, rank: int, *rest: Any) -> None:
        if rank == 0:
            formed.append(store)
            assert published.wait(LIMIT_S)
        gather(store, rank, *rest)

    monkeypatch.setattr(process_group, "_gather", gather_later)
    sender = make_sender(stack)
    engine = member(stack, sender, "engine")
    service = sender._service
    is_forming = lambda: service.broadcaster._memberships or None  # noqa: E731
    assert await service.wakeups.wait_for(is_forming, timeout_s=LIMIT_S)
    for version in range(3):
        sender.publish(version, tensors(version).items())
        await engine.wait(version, timeout_s=LIMIT_S)
    published.set()
    await grouped(sender, "engine")
    before = sender.stats()
    await give(sender, 3, engine)
    assert sender.stats().bytes_sent == before.bytes_sent
    assert len(formed) == 1


async def test_a_group_that_cannot_be_ended_is_told_of_and_another_is_formed(
    stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    class Stuck:
        def shutdown(self) -> None:
            raise RuntimeError("the device is gone")

    sender = make_sender(stack)
    engine = member(stack, sender, "engine")
    group = await grouped(sender, "engine")
    group._group = Stuck()
    other = member(stack, sender, "other")
    await grouped(sender, "engine", "other", after=group)
    assert "the device is gone" in caplog.text
    await give(sender, 0, engine, other)


async def test_a_killed_sender_leaves_members_that_close(stack: ExitStack) -> None:
    peer = Peer(send)
    stack.callback(peer.close)
    address = await peer.hear()
    before = set(threading.enumerate())
    engine = WeightReceiver(address, name="engine", medium="gloo", limit_s=SHORT_S)
    for version in range(3):
        peer.pipe.send(version)
        await engine.wait(version, timeout_s=LIMIT_S)
    peer.kill()
    check(engine, 2)
    engine.close()
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("when", ["at once", "in a version"])
async def test_closing_leaves_no_thread(stack: ExitStack, when: str) -> None:
    before = set(threading.enumerate())
    with WeightSender(chunk_mib=CHUNK_MIB) as sender, ExitStack() as members:
        names = ["one", "two", "three"]
        engines = [member(members, sender, name) for name in names]
        if when == "in a version":
            await grouped(sender, *names)
            sender.publish(0, tensors(0, scale=30).items())
            engines[0].close()
            for engine in engines[1:]:
                await engine.wait(0, timeout_s=LIMIT_S)
                check(engine, 0, scale=30)
    assert set(threading.enumerate()) <= before


def test_nccl_without_a_gpu_is_refused(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    sender = make_sender(stack)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"weights\.medium=nccl is for .* CUDA devices"):
        WeightReceiver(sender.address, name="engine", medium="nccl")
