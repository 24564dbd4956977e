"""Calls that make no sense are refused before anything is sent. The clients' queue does not exist."""

import asyncio
import multiprocessing
import os
import re
import select
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tailrace.errors import PeerLost, QueueError, TailraceError, UserError, WireError
from tailrace.transfer.queue.adapters.dataset import StreamingDataset
from tailrace.transfer.queue.address import QueueAddress
from tailrace.transfer.queue.base import Claim, NewRow
from tailrace.transfer.queue.client.checks import seconds
from tailrace.transfer.queue.client.remote import RemoteQueue
from tailrace.transfer.queue.client.sync_queue import SyncQueue
from tailrace.transfer.wire.sockets import host_id
from tests.transfer.client.servers import LIMIT_S, TOKEN, serving
from tests.transfer.remote.faces import Face, remote, sync
from tests.transfer.tables import group, tokens

CLAIM = Claim(lease_id=1, lease_s=60.0, task="rollout", rows=())
INTEGER = "expected an integer of 64 bits, signed"
ROW_ID = "for a row, expected its RowId: row.id of a row of the claim"
SECONDS = "expected 0 to 1e+09 seconds"
Call = Callable[[Face], Any]


def nowhere(directory: Path) -> QueueAddress:
    return QueueAddress(endpoints=[f"ipc://{directory}/nobody"], host=host_id(), token=TOKEN)


@pytest.fixture(params=[remote, sync])
def queue(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Face]:
    with request.param(nowhere(tmp_path), limit_s=0.1) as face:
        yield face


BAD_CALLS: list[tuple[Call, str]] = [
    (lambda queue: queue.claim("rollout", limit=2**70), f"a claim's limit: got {2**70}, {INTEGER}"),
    (lambda queue: queue.claim("rollout", limit=0), "a claim's limit must be at least 1, got 0"),
    (lambda queue: queue.claim("rollout", rank="first"), f"rank: got 'first', {INTEGER}"),
    (lambda queue: queue.claim(None), "task: got None, expected the name of a task"),
    (lambda queue: queue.claim("rollout", timeout=float("inf")), f"timeout: got inf, {SECONDS}"),
    (lambda queue: queue.claim("rollout", timeout=float("nan")), f"timeout: got nan, {SECONDS}"),
    (lambda queue: queue.lost_groups(timeout="5"), f"timeout: got '5', {SECONDS}"),
    (lambda queue: queue.put([], timeout=1e300), f"timeout: got 1e+300, {SECONDS}"),
    (lambda queue: queue.put(row for row in group(1)), "rows: got generator "),
    (lambda queue: queue.advance(2**63), f"version: got {2**63}, {INTEGER}"),
    (lambda queue: queue.advance(1.5), f"version: got 1.5, {INTEGER}"),
    (lambda queue: queue.ack(CLAIM, {(2**63, 0): {}}), f"got ({2**63}, 0) {ROW_ID}"),
    (lambda queue: queue.ack(CLAIM, {("a", 0): {}}), f"got ('a', 0) {ROW_ID}"),
    (lambda queue: queue.ack(CLAIM, {0: {}}), f"got 0 {ROW_ID}"),
    (lambda queue: queue.ack(CLAIM, [(1, 0)]), "outputs: got list [(1, 0)], expected a mapping by RowId"),
    (lambda queue: queue.nack(CLAIM, [(1, 2, 3)]), f"got (1, 2, 3) {ROW_ID}"),
]


@pytest.mark.parametrize(("call", "text"), BAD_CALLS)
def test_a_call_that_cannot_be_meant_is_one_clear_line(queue: Face, call: Call, text: str) -> None:
    with pytest.raises(QueueError, match=f"^{re.escape(text)}"):
        call(queue)


def test_a_call_that_was_refused_does_not_spoil_the_next(tmp_path: Path) -> None:
    with serving(tmp_path) as served, sync(served.address) as queue:
        for task in ("\ud800", "critic"):
            with pytest.raises(QueueError, match="task"):
                queue.claim(task, timeout=LIMIT_S)
        assert queue.stats().rows == 0


@pytest.mark.parametrize("face", [remote, sync])
def test_integers_of_numpy_are_integers(tmp_path: Path, face: Callable[..., Face]) -> None:
    with serving(tmp_path) as served, face(served.address, timeout_s=np.float32(LIMIT_S)) as queue:
        queue.advance(np.int64(2))
        numbers: dict[str, Any] = {"group_id": 1, "group_size": 1, "order": 5, "not_before": 2}
        numbers = {name: np.int64(number) for name, number in numbers.items()}
        queue.put([NewRow(cells={"prompt_ids": tokens(2)}, **numbers)])
        claim = queue.claim("rollout", limit=np.int64(4))
        assert [(row.group_id, row.order) for row in claim.rows] == [(1, 5)]
        queue.ack(claim, {claim.rows[0].id: {"response_ids": tokens(1)}})
        assert queue.stats().version == 2


def test_what_is_left_of_a_limit_may_be_less_than_nothing() -> None:
    assert [seconds("timeout", value) for value in (-1, -1e300, 5, 0.5)] == [0.0, 0.0, 5.0, 0.5]


@pytest.mark.parametrize("make", [RemoteQueue, SyncQueue])
@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"name": "\ud800"}, WireError, r"the name of a client is text, in valid Unicode; got '\\ud800'"),
        ({"limit_s": 0}, QueueError, "limit_s: got 0, expected more than 0 seconds"),
        ({"limit_s": float("inf")}, QueueError, "limit_s: got inf, expected 0 to"),
        ({"timeout_s": None}, QueueError, "timeout_s: got None, expected 0 to"),
        ({"address": "run/connection.json"}, UserError, r"got 'run/.*, expected a QueueAddress: QueueAddress.read\(p"),
    ],
)
def test_a_client_that_cannot_be_made_is_one_clear_line(
    tmp_path: Path, make: Callable[..., Any], options: dict[str, Any], error: type[TailraceError], text: str
) -> None:
    with pytest.raises(error, match=text):
        make(**{"address": nowhere(tmp_path), "name": "tester", **options})


def test_a_data_set_takes_an_address() -> None:
    with pytest.raises(UserError, match="expected a QueueAddress"):
        StreamingDataset("connection.json", "actor")  # type: ignore[arg-type]


def test_a_client_is_of_no_use_to_a_forked_process_and_leaving_it_there_is_harmless(tmp_path: Path) -> None:
    parent = os.getpid()
    reader, writer = os.pipe()
    try:
        with SyncQueue(nowhere(tmp_path), name="tester", limit_s=0.1) as queue, queue.held(CLAIM):
            child = os.fork()
            if child == 0:
                with pytest.raises(QueueError) as refused:
                    queue.stats()
                raise KeyError(str(refused.value))  # so that no other error takes its place
    except BaseException as error:
        if os.getpid() == parent:
            raise
        os.write(writer, repr(error).encode())
    finally:
        if os.getpid() != parent:
            os._exit(0)
    os.close(writer)
    assert said(reader, child) == repr(
        KeyError(
            f"this client of the queue was made in process {parent} and cannot be used in process {child}, which was "
            f"forked from it; make one in each process"
        )
    )


async def test_so_is_one_of_an_event_loop(tmp_path: Path) -> None:
    async def use(queue: RemoteQueue) -> None:
        async with asyncio.timeout(LIMIT_S):
            try:
                with pytest.raises(QueueError, match="made in process"):
                    await queue.advance(1)
            finally:
                await queue.__aexit__(None, None, None)

    async with RemoteQueue(nowhere(tmp_path), name="tester", limit_s=0.1) as queue:
        child = multiprocessing.get_context("fork").Process(target=lambda: asyncio.run(use(queue)))
        child.start()
        child.join(LIMIT_S)
        assert child.exitcode == 0
        with pytest.raises(PeerLost):
            await queue.stats()  # the client still works here


def said(reader: int, child: int) -> str:
    """The text that a child has written before it ended."""
    ready, _, _ = select.select([reader], [], [], LIMIT_S)
    if not ready:
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert ready, "the child says nothing"
    with open(reader, "rb") as pipe:
        return pipe.read().decode()
