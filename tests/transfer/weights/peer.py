"""Processes that send or receive, forked from a server that has imported torch once.

sender      sends its address, then publishes a version for each number that it receives
receiver    receives an address, then reports each version that it has received and checked, until `versions` have come,
            or the name of the error that ended its wait
hold        receives an address, takes the turn, reports that, and keeps the turn
"""

import asyncio
import ctypes
import multiprocessing
import os
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from tailrace.errors import WeightsError
from tailrace.transfer.weights.receiver import WeightReceiver
from tailrace.transfer.weights.sender import WeightSender
from tests.transfer.weights.helpers import CHUNK_MIB, LIMIT_S, check, tensors


def send(pipe: Connection, *, scale: int = 1, **options: Any) -> None:
    """Run a sender."""
    with WeightSender(**{"chunk_mib": CHUNK_MIB} | options) as sender:
        pipe.send(sender.address)
        while True:
            version = pipe.recv()
            sender.publish(version, tensors(version, scale=scale).items())


def receive(pipe: Connection, *, versions: int, scale: int = 1, **options: Any) -> None:
    """Run a receiver."""

    async def follow(receiver: WeightReceiver) -> None:
        version = -1
        for _ in range(versions):
            version = await receiver.wait(version + 1, timeout_s=LIMIT_S)
            check(receiver, version, scale=scale)
            receiver.installed(version)
            pipe.send((version, receiver.stats().bytes_received))

    with WeightReceiver(pipe.recv(), **options) as receiver:
        try:
            asyncio.run(follow(receiver))
        except WeightsError as error:
            pipe.send(type(error).__name__)
        pipe.recv()  # others may still get weights from here


def hold(pipe: Connection, **options: Any) -> None:
    """Run a receiver whose engine never finishes its turn."""

    async def keep(receiver: WeightReceiver) -> None:
        async with receiver.turn():
            pipe.send("has the turn")
            pipe.recv()

    with WeightReceiver(pipe.recv(), **options) as receiver:
        asyncio.run(keep(receiver))


def enter(namespace: str) -> None:
    """Move this process into the network of a namespace. It must have one thread."""
    file = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    assert ctypes.CDLL(None, use_errno=True).setns(file, 0) == 0, os.strerror(ctypes.get_errno())
    os.close(file)


def _run(role: Callable[..., None], pipe: Connection, namespace: str | None, options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    if namespace is not None:
        enter(namespace)
    with suppress(EOFError):  # the test has ended
        role(pipe, **options)


_CONTEXT = multiprocessing.get_context("forkserver")


class Peer:
    """A process: `Peer(send, …)` or `Peer(receive, …)`, with the options of the role."""

    def __init__(self, role: Callable[..., None], *, namespace: str | None = None, **options: Any) -> None:
        """`namespace`: the one whose network the process is in."""
        _CONTEXT.set_forkserver_preload([__name__])
        self.pipe, theirs = _CONTEXT.Pipe()
        self.process = _CONTEXT.Process(target=_run, args=(role, theirs, namespace, options), daemon=True)
        self.process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        """The pid of the process."""
        assert self.process.pid is not None
        return self.process.pid

    async def hear(self) -> Any:
        """The next message of the process."""
        assert await asyncio.to_thread(self.pipe.poll, 2 * LIMIT_S), "it says nothing"
        return self.pipe.recv()

    def kill(self) -> None:
        """Kill the process with SIGKILL."""
        self.process.kill()
        self.process.join(LIMIT_S)

    def close(self) -> None:
        """Kill the process, whatever it does."""
        self.kill()
        self.pipe.close()


def shared(directory: Path) -> int:
    """The number of shared memory directories in `directory`."""
    return len(list(directory.iterdir()))
