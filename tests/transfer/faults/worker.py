"""Producers and consumers that may be killed: `python -m tests.transfer.faults.worker CONNECTION SILENCE_S`.

    test ──"produce 0 100 2"──▶ this process, which has everything imported ──fork──▶ producer
         ◀──────pid───────────                                              ──fork──▶ consumer

This process and all its children end when the test closes the pipe or is killed.
"""

import asyncio
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np

from tailrace.errors import GroupExists, LeaseError, PeerLost, QueueClosed, StaleRowError
from tailrace.transfer.queue.address import QueueAddress
from tailrace.transfer.queue.base import Row, TransferQueue
from tailrace.transfer.queue.client.remote import RemoteQueue
from tailrace.types import IntArray
from tests.transfer.faults.rows import group, response

SILENCE_S = 1.0
"""The time after which either side takes the other for dead."""
TIMEOUT_S = 60.0


async def produce(queue: TransferQueue, groups: range) -> None:
    """Put all of `groups`, whatever an earlier producer has put of them."""
    for group_id in groups:
        await put(queue, group_id)


async def put(queue: TransferQueue, group_id: int) -> None:
    """Put a group, which may be there already."""
    while True:
        try:
            with suppress(GroupExists):
                await queue.put(group(group_id))
            return
        except PeerLost:
            continue  # the controller is restarting: the group may be there or not


async def consume(queue: TransferQueue) -> None:
    """Claim all prompts and write their responses."""
    while True:
        try:
            claim = await queue.claim("work")
            await queue.ack(claim, {row.id: {"response_ids": _answer(row)} for row in claim.rows})
        except (PeerLost, LeaseError, StaleRowError):
            continue  # the rows come again, or their prompts are put again


async def stop(queue: TransferQueue) -> None:
    """Claim rows and stop. When this process goes on, its rows must have gone to another, so its ack must fail."""
    claim = await queue.claim("work")
    os.kill(os.getpid(), signal.SIGSTOP)
    with suppress(LeaseError, StaleRowError):
        await queue.ack(claim, {row.id: {"response_ids": _answer(row)} for row in claim.rows})
        raise AssertionError("the ack of a lease that had ended was taken")


def _answer(row: Row) -> IntArray:
    prompt_ids = row.cells["prompt_ids"]
    assert isinstance(prompt_ids, np.ndarray)
    return response(prompt_ids)


async def _work(connection: Path, words: list[str], silence_s: float) -> None:
    async with RemoteQueue(
        QueueAddress.read(connection), name=words[0], timeout_s=TIMEOUT_S, limit_s=silence_s
    ) as queue:
        with suppress(QueueClosed):
            match words:
                case "produce", *groups:
                    await produce(queue, range(*map(int, groups)))
                case ["consume"]:
                    await consume(queue)
                case ["stop"]:
                    await stop(queue)


def main() -> None:
    """Fork a worker for each line."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            asyncio.run(_work(Path(sys.argv[1]), line.split(), float(sys.argv[2])))
            os._exit(0)
        print(child, flush=True)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
