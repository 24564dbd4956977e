"""A network between clients and servers that is slow, stalls and loses connections.

    client ──TCP──▶ Proxy ──seeded delays, cuts──▶ TCP ──▶ server

It runs in a thread with a loop of its own.
"""

import asyncio
import random
import threading
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Self

LIMIT_S = 20.0
_PIECE_BYTES = 4096


class Proxy:
    """A proxy to one endpoint."""

    def __init__(self, endpoint: str, *, seed: int = 0) -> None:
        """Make a proxy with a good network at first."""
        self._host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        self._port = int(port)
        self._source = random.Random(seed)
        self._delay_s = 0.0
        self._cut_every = 0
        self._writers: set[asyncio.StreamWriter] = set()
        self._passed: Callable[[bytes], bool] = lambda piece: False
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self.cuts = 0

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(LIMIT_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive()

    def worsen(self, *, delay_s: float, cut_every: int) -> None:
        """Set the longest delay of a piece, and the mean number of pieces after which connections are lost."""
        self._delay_s, self._cut_every = delay_s, cut_every

    def cut_after(self, word: bytes, times: int) -> None:
        """Lose all connections as soon as bytes with `word` have gone to the server; do this `times` times."""
        left = [None] * times

        def passed(piece: bytes) -> bool:
            return word in piece and bool(left) and left.pop() is None

        self._passed = passed

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        self.endpoint = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._ready.set()
        await self._ended.wait()
        server.close()
        self._cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(self._host, self._port)
        self._writers |= {writer, back}
        ways = (self._pass_on(reader, back, self._after_request), self._pass_on(there, writer, lambda piece: None))
        self._tasks |= {asyncio.create_task(way) for way in ways}

    async def _pass_on(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, then: Callable[[bytes], None]
    ) -> None:
        with suppress(ConnectionError):
            while piece := await reader.read(_PIECE_BYTES):
                if self._delay_s:
                    await asyncio.sleep(self._source.random() * self._delay_s)
                writer.write(piece)
                await writer.drain()
                then(piece)
                if self._cut_every and self._source.randrange(self._cut_every) == 0:
                    self._cut()
        writer.close()

    def _after_request(self, piece: bytes) -> None:
        if self._passed(piece):
            self._cut()

    def _cut(self) -> None:
        self.cuts += 1
        for writer in self._writers:
            writer.close()  # sends what has come before it closes
        self._writers.clear()
