"""Versions from a sender to receivers of the same process."""

import asyncio
import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from tailrace.config.weights import WeightsMedium
from tailrace.errors import SenderLost, WeightsError, WeightsTimeout, WireError
from tailrace.events import Event, EventLog
from tailrace.transfer.weights.chunk_server import ChunkQuestion
from tailrace.transfer.weights.download import Download
from tailrace.transfer.weights.messages import GetManifest
from tailrace.transfer.weights.receiver import WeightReceiver
from tailrace.transfer.weights.segments import Segment
from tailrace.transfer.weights.sender import WeightSender
from tests.transfer.weights.helpers import CHUNK_MIB, LIMIT_S, check, error_of, everybody_listens, tensors

MEDIA: list[WeightsMedium] = [name for name in get_args(WeightsMedium) if name != "nccl"]
"""The media that need no GPU."""


@pytest.fixture
def sender() -> Iterator[WeightSender]:
    with WeightSender(chunk_mib=CHUNK_MIB) as sender:
        yield sender


def receiver(sender: WeightSender, name: str = "engine", **options: Any) -> WeightReceiver:
    return WeightReceiver(sender.address, name=name, **options)


@pytest.mark.parametrize("medium", MEDIA)
async def test_each_version_arrives_bit_for_bit(sender: WeightSender, medium: WeightsMedium) -> None:
    with receiver(sender, medium=medium) as engine:
        for version in range(6):
            sender.publish(version, tensors(version).items())
            assert await engine.wait(version, timeout_s=LIMIT_S) == version
            check(engine, version)
        sent = sender.stats().bytes_sent + sender.stats().bytes_broadcast
        assert sent == engine.stats().bytes_received
        assert sent == (6 * sender.stats().nbytes if medium in ("tcp", "gloo") else 0)


@pytest.mark.parametrize("medium", MEDIA)
async def test_floats_travel_in_the_dtype_asked_for_and_integers_as_they_are(medium: WeightsMedium) -> None:
    with (
        WeightSender(chunk_mib=CHUNK_MIB, dtype=torch.bfloat16) as sender,
        receiver(sender, medium=medium) as engine,
    ):
        sender.publish(0, tensors(0).items())
        await engine.wait(0, timeout_s=LIMIT_S)
        check(engine, 0, dtype=torch.bfloat16)


@pytest.mark.parametrize("medium", MEDIA)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
async def test_tensors_longer_than_a_chunk_arrive_bit_for_bit(medium: WeightsMedium, dtype: torch.dtype) -> None:
    with (
        WeightSender(chunk_mib=1.5, dtype=dtype) as sender,
        receiver(sender, medium=medium) as engine,
    ):
        for version in range(2):
            sender.publish(version, tensors(version, scale=60).items())
            await engine.wait(version, timeout_s=LIMIT_S)
            check(engine, version, scale=60, dtype=dtype)


async def test_tensors_may_change_when_they_are_published(sender: WeightSender) -> None:
    weights = tensors(0)
    sender.publish(0, weights.items())
    for tensor in weights.values():
        tensor.zero_()
    with receiver(sender) as engine:
        await engine.wait(0, timeout_s=LIMIT_S)
        check(engine, 0)


async def test_a_tensor_that_does_not_lie_in_one_piece_arrives_as_it_looks(sender: WeightSender) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    sender.publish(0, [("transposed", base.T), ("strided", base[:, ::2])])
    with receiver(sender) as engine:
        await engine.wait(0, timeout_s=LIMIT_S)
        with engine.weights() as (_, got):
            assert torch.equal(got["transposed"], base.T)
            assert torch.equal(got["strided"], base[:, ::2])


async def test_who_comes_late_gets_the_newest_version_alone(sender: WeightSender) -> None:
    for version in (3, 5, 9):
        sender.publish(version, tensors(version).items())
    with receiver(sender, medium="tcp") as engine:
        assert await engine.wait(4, timeout_s=LIMIT_S) == 9
        check(engine, 9)
        assert engine.stats().bytes_received == sender.stats().nbytes


@pytest.mark.parametrize("medium", MEDIA)
async def test_what_is_read_stays_as_it_is_while_newer_versions_come(
    sender: WeightSender, medium: WeightsMedium
) -> None:
    with receiver(sender, medium=medium) as engine:
        sender.publish(0, tensors(0).items())
        await engine.wait(0, timeout_s=LIMIT_S)
        with engine.weights() as (version, old):
            for newer in range(1, 6):
                sender.publish(newer, tensors(newer).items())
                await engine.wait(newer, timeout_s=LIMIT_S)
                check(engine, newer)
            assert version == 0
            assert all(torch.equal(old[name], tensor) for name, tensor in tensors(0).items())
        sender.publish(6, tensors(6).items())
        await engine.wait(6, timeout_s=LIMIT_S)
        check(engine, 6)


async def test_memory_is_used_again(sender: WeightSender) -> None:
    with receiver(sender) as shared, receiver(sender, "far", medium="tcp") as copied:
        for version in range(8):
            sender.publish(version, tensors(version).items())
            for engine in (shared, copied):
                await engine.wait(version, timeout_s=LIMIT_S)
        for pool in (sender._pool, copied._service.memory.pool):
            assert len(list(pool.directory.iterdir())) <= 3
        assert list(shared._service.memory.pool.directory.iterdir()) == []


async def test_reserved_memory_is_what_versions_are_written_to(sender: WeightSender) -> None:
    sender.reserve(tensors(0).items())
    reserved = set(sender._pool.directory.iterdir())
    with receiver(sender) as engine:
        for version in range(4):
            sender.publish(version, tensors(version).items())
            await engine.wait(version, timeout_s=LIMIT_S)
            engine.installed(version)
            await sender.installed(version, timeout_s=LIMIT_S)
    assert len(reserved) == 2
    assert set(sender._pool.directory.iterdir()) == reserved


async def test_installed_waits_for_those_who_are_there(sender: WeightSender) -> None:
    await sender.installed(0, timeout_s=LIMIT_S)  # there is no receiver
    sender.publish(0, tensors(0).items())
    with receiver(sender, "one") as one, receiver(sender, "two") as two:
        for engine in (one, two):
            await engine.wait(0, timeout_s=LIMIT_S)
        one.installed(0)
        with pytest.raises(WeightsTimeout, match="two: version 0 of the weights is not installed"):
            await sender.installed(0, timeout_s=0.2)
        two.installed(0)
        await sender.installed(0, timeout_s=LIMIT_S)
        assert {name: state.installed for name, state in sender.stats().receivers.items()} == {"one": 0, "two": 0}
        waiting = asyncio.create_task(sender.installed(1, timeout_s=LIMIT_S))
        one.close()
        two.close()
        await waiting


async def test_a_wait_has_a_limit_and_says_what_is_here(sender: WeightSender) -> None:
    sender.publish(0, tensors(0).items())
    with receiver(sender) as engine:
        await engine.wait(0, timeout_s=LIMIT_S)
        with pytest.raises(WeightsTimeout, match=r"version 1 .* has not come within 0\.1 s; here is 0"):
            await engine.wait(1, timeout_s=0.1)
        await engine.announcement(0, timeout_s=LIMIT_S)
        with pytest.raises(WeightsTimeout, match="announced 0"):
            await engine.announcement(1, timeout_s=0.1)
        assert engine.received == engine.announced == 0


async def test_a_closed_sender_ends_the_wait_of_receivers() -> None:
    sender = WeightSender()
    with receiver(sender) as engine:
        waiting = asyncio.create_task(engine.wait(0, timeout_s=LIMIT_S))
        sender.publish(1, tensors(1).items())
        assert await waiting == 1
        await everybody_listens(sender)
        sender.close()
        with pytest.raises(SenderLost, match="closed"):
            await engine.wait(2, timeout_s=LIMIT_S)
        with pytest.raises(SenderLost, match="closed"):
            await engine.announcement(2, timeout_s=LIMIT_S)
        check(engine, 1)
        with pytest.raises(WeightsError, match="closed"):
            sender.publish(2, tensors(2).items())


async def test_who_does_not_know_the_token_gets_nothing(sender: WeightSender) -> None:
    sender.publish(0, tensors(0).items())
    address = type(sender.address)(endpoints=sender.address.endpoints, host=sender.address.host, token=bytes(32))
    with WeightReceiver(address, name="stranger") as engine:
        with pytest.raises(SenderLost, match="does not know the token"):
            await engine.wait(0, timeout_s=LIMIT_S)
        with pytest.raises(WeightsError, match="no version"), engine.weights():
            pass
    assert sender.stats().receivers == {}


async def test_a_receiver_that_is_refused_with_more_than_one_question_under_way_goes_on(sender: WeightSender) -> None:
    address = type(sender.address)(endpoints=sender.address.endpoints, host=sender.address.host, token=bytes(32))
    with WeightReceiver(address, name="stranger") as engine:
        service = engine._service
        for _ in range(2):
            before = await service.wakeups.wait_for(lambda: error_of(engine), timeout_s=LIMIT_S)

            def ask_twice() -> None:
                if service.sender._link is None:
                    service.sender.connect()
                service.sender.report_progress()

            engine._server.call(ask_twice)
            again = lambda: None if error_of(engine) is before else True  # noqa: E731, B023
            assert await service.wakeups.wait_for(again, timeout_s=LIMIT_S)
        goes_on = threading.Event()
        engine._server.call(goes_on.set)
        assert await asyncio.to_thread(goes_on.wait, LIMIT_S)


def test_a_token_is_not_found_in_logs(sender: WeightSender) -> None:
    assert "token" not in repr(sender.address)


def test_what_cannot_be_published_is_said_and_leaves_the_version_before(sender: WeightSender) -> None:
    sender.publish(1, tensors(1).items())
    with pytest.raises(WeightsError, match="version 1 is not newer than 1"):
        sender.publish(1, tensors(1).items())
    with pytest.raises(WeightsError, match="a comes twice"):
        sender.publish(2, [("a", torch.ones(1)), ("a", torch.ones(1))])
    with pytest.raises(WeightsError, match="complex64, which does not travel"):
        sender.publish(2, [("a", torch.ones(1, dtype=torch.complex64))])
    assert sender.stats().version == 1


async def test_a_version_that_fails_half_way_is_withdrawn(
    sender: WeightSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender.publish(0, tensors(0).items())
    with receiver(sender) as engine:
        await engine.wait(0, timeout_s=LIMIT_S)

        def fail(chunk: int, value: bytes) -> None:
            raise RuntimeError("the device is gone")

        with monkeypatch.context() as patch:
            patch.setattr("tailrace.transfer.weights.sender.StoredVersion.add", lambda *_: fail(0, b""))
            with pytest.raises(RuntimeError, match="the device is gone"):
                sender.publish(1, tensors(1).items())
        check(engine, 0)
        sender.publish(2, tensors(2).items())
        assert await engine.wait(1, timeout_s=LIMIT_S) == 2
        check(engine, 2)


async def test_publications_and_transfers_are_events() -> None:
    events: list[Event] = []
    log = EventLog(sinks=(events.append,))
    with WeightSender(log=log) as sender, receiver(sender, "engine-3", log=log) as engine:
        sender.publish(4, tensors(4).items())
        await engine.wait(4, timeout_s=LIMIT_S)
        nbytes = sender.stats().nbytes
    published, came = sorted(events, key=lambda event: event.task)
    assert (published.task, published.version, published.metrics) == ("weights_publish", 4, {"bytes": nbytes})
    assert (came.task, came.actor, came.version) == ("weights_transfer", "engine-3", 4)
    assert came.metrics == {"bytes": nbytes, "network_bytes": 0.0, "broadcast_bytes": 0.0}
    assert 0 <= came.start <= came.end


@pytest.mark.parametrize("medium", MEDIA)
async def test_a_version_whose_memory_was_changed_is_given_up_and_the_next_one_comes(
    sender: WeightSender, medium: WeightsMedium
) -> None:
    sender.publish(0, tensors(0).items())
    assert sender._stored is not None
    sender._stored.memory[70_000] ^= 1
    with receiver(sender, medium=medium) as engine:
        with pytest.raises(WeightsError, match="chunk 4 of version 0 arrived corrupt 5 times"):
            await engine.wait(0, timeout_s=LIMIT_S)
        assert engine.received is None
        waiting = asyncio.create_task(engine.wait(1, timeout_s=LIMIT_S))
        sender.publish(1, tensors(1).items())
        assert await waiting == 1
        check(engine, 1)


@pytest.mark.parametrize("question", ["manifest", "chunks"])
async def test_a_version_that_a_parent_gives_errors_for_is_given_up_with_the_last_of_them(
    sender: WeightSender, monkeypatch: pytest.MonkeyPatch, question: str
) -> None:
    answer = sender._service.chunk_server._reply

    def refuse(wanted: ChunkQuestion) -> Any:
        if isinstance(wanted, GetManifest) == (question == "manifest"):
            raise WireError("the disk is on fire")
        return answer(wanted)

    monkeypatch.setattr(sender._service.chunk_server, "_reply", refuse)
    sender.publish(0, tensors(0).items())
    with receiver(sender, medium="tcp") as engine:
        what = "the manifest" if question == "manifest" else r"chunk \d"
        with pytest.raises(
            WeightsError, match=f"^{what} of version 0 has not come right in 5 tries: the disk is on fire$"
        ):
            await engine.wait(0, timeout_s=LIMIT_S)


class Broken(Exception):
    """An error of an unexpected type."""


def break_down() -> None:
    raise Broken("a disk is full")


async def test_a_sender_whose_thread_fails_says_so_to_all_that_wait(sender: WeightSender) -> None:
    sender.publish(0, tensors(0).items())
    with receiver(sender) as engine:
        await engine.wait(0, timeout_s=LIMIT_S)
        waiting = asyncio.create_task(sender.installed(0, timeout_s=LIMIT_S))
        sender._server.call(break_down)
        with pytest.raises(WeightsError, match="this sender of weights failed: Broken: a disk is full") as caught:
            await waiting
        assert isinstance(caught.value.__cause__, Broken)
        with pytest.raises(WeightsError, match="failed: Broken: a disk is full"):
            sender.publish(1, tensors(1).items())


def test_a_publication_whose_own_work_ends_the_thread_is_told_at_once(
    sender: WeightSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender._service, "begin", lambda _: break_down())
    with pytest.raises(WeightsError, match="failed: Broken: a disk is full"):
        sender.publish(0, tensors(0).items())


def test_a_thread_that_ends_while_one_stops_waiting_tells_the_others(sender: WeightSender) -> None:
    class Stopping(Future[object]):
        def done(self) -> bool:
            return False  # as when it was looked at

    stopping, waiting = Stopping(), Future[object]()
    stopping.cancel()
    sender._thread._asked |= {stopping, waiting}
    sender._server.call(break_down)
    with pytest.raises(WeightsError, match="failed: Broken"):
        waiting.result(LIMIT_S)
    sender._thread.join(LIMIT_S)


async def test_a_receiver_whose_thread_fails_says_so_to_all_that_wait(sender: WeightSender) -> None:
    with receiver(sender) as engine:
        waits = [
            asyncio.create_task(engine.wait(0, timeout_s=LIMIT_S)),
            asyncio.create_task(engine.wait(1, timeout_s=LIMIT_S)),
        ]
        engine._server.call(break_down)
        for waiting in waits:
            with pytest.raises(WeightsError, match="this receiver of weights failed: Broken: a disk is full") as caught:
                await waiting
            assert isinstance(caught.value.__cause__, Broken)
        with pytest.raises(WeightsError, match="failed: Broken"):
            await engine.heard(timeout_s=LIMIT_S)


def test_what_was_closed_leaves_nothing(tmp_path: Path) -> None:
    with WeightSender(directory=tmp_path) as sender, receiver(sender, directory=tmp_path):
        sender.publish(0, tensors(0).items())
        assert len(list(tmp_path.iterdir())) == 2
        sockets = [Path(endpoint.removeprefix("ipc://")) for endpoint in sender.address.endpoints[:1]]
        assert all(path.exists() for path in sockets)
    sender.close()
    assert list(tmp_path.iterdir()) == []
    assert not any(path.exists() for path in sockets)


def test_a_place_without_room_and_an_endpoint_that_is_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="no directory for shared memory"):
        WeightSender(directory=tmp_path / "missing")
    with pytest.raises(WeightsError, match="chunk_mib is 2000; give 1024 or less"):
        WeightSender(chunk_mib=2000)
    with pytest.raises(WireError, match="cannot listen"):
        WeightSender(listen=("tcp://nowhere",))


async def test_both_ends_go_on_while_memory_is_found(sender: WeightSender, monkeypatch: pytest.MonkeyPatch) -> None:
    find, found = os.posix_fallocate, []
    with receiver(sender, medium="tcp") as engine:

        def find_slowly(file: int, offset: int, size: int) -> None:
            for server in (sender._server, engine._server):
                goes_on = threading.Event()
                server.call(goes_on.set)
                assert goes_on.wait(LIMIT_S), "its thread is busy with this"
            find(file, offset, size)
            found.append(size)

        monkeypatch.setattr(os, "posix_fallocate", find_slowly)
        sender.publish(0, tensors(0).items())
        await engine.wait(0, timeout_s=LIMIT_S)
        check(engine, 0)
    assert len(found) == 2


async def test_memory_that_is_found_for_a_parent_that_was_left_is_let_go(
    sender: WeightSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    with receiver(sender) as engine:
        service, found = engine._service, list[Segment]()
        attach = service.memory._attachments.attach

        def leave() -> None:
            assert service._download is not None
            service._download.leave()
            service._advance()

        def attach_late(*what: Any) -> Segment:
            if not found:
                engine._server.call(leave)
            found.append(attach(*what))
            return found[-1]

        monkeypatch.setattr(service.memory._attachments, "attach", attach_late)
        sender.publish(0, tensors(0).items())
        await engine.wait(0, timeout_s=LIMIT_S)
        check(engine, 0)
        first, second = found
        assert first is second
        assert first._holds == 1


async def test_memory_that_is_attached_again_after_a_silence_of_its_parent_is_held_once(
    sender: WeightSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    with receiver(sender) as engine:
        service, placed = engine._service, engine._service.placed
        times: list[Segment] = []

        def leave() -> None:
            if service._download is not None:
                service._download.leave()
                service._advance()

        def placed_and_left(download: Download) -> None:
            placed(download)
            assert download.stored is not None
            times.append(download.stored.segment)
            if len(times) == 1:
                engine._server.call(leave)

        monkeypatch.setattr(service, "placed", placed_and_left)
        sender.publish(0, tensors(0).items())
        await engine.wait(0, timeout_s=LIMIT_S)
        check(engine, 0)
        assert [segment is times[0] for segment in times] == [True, True]
        assert times[0]._holds == 1


async def test_a_machine_without_room_is_an_error_and_not_a_signal(
    sender: WeightSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: int, offset: int, size: int) -> None:
        raise OSError(28, os.strerror(28))

    sender.publish(0, tensors(0).items())
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with (
            receiver(sender, medium="tcp") as engine,
            pytest.raises(WeightsError, match=r"cannot be had in .*: No space left on device; make room"),
        ):
            await engine.wait(0, timeout_s=LIMIT_S)
        with pytest.raises(WeightsError, match="No space left"):
            sender.publish(1, tensors(1).items())
    sender.publish(2, tensors(2).items())
    assert sender.stats().version == 2
