"""The endpoint at a port of this machine."""

import asyncio
import errno
import socket
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext

import uvicorn

from tailrace.errors import UserError, on_failure
from tailrace.rollout.http.app import Endpoint

_END_S = 5
"""Seconds for open requests to end by themselves, when the server does. Then they get an error."""
_CUT_S = 15
"""Seconds after which the connections of those are cut that do not even take that."""


class _Server(uvicorn.Server):
    """A server that tells when it has started, and leaves signals to its program."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen."""
        await super().startup(sockets)
        self.up.set()

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]  # it is a generator there
        """Capture none."""
        return nullcontext()


def bound(host: str, port: int, *, keys: tuple[str, str] = ("--host", "--port")) -> socket.socket:
    """Take a port, for `listening`. `port`: 0 takes a free one. `keys`: the options that say which.

    Raises:
        UserError: it cannot be had.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    with on_failure(listener.close):
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except (OSError, UnicodeError) as error:
            why = getattr(error, "strerror", None) or "it is no name of a host"
            key = keys[getattr(error, "errno", None) in (errno.EADDRINUSE, errno.EACCES)]
            raise UserError(f"port {port} of {host} cannot be had: {why}; choose another {key}") from None
    return listener


@asynccontextmanager
async def listening(endpoint: Endpoint, listener: socket.socket) -> AsyncIterator[str]:
    """Serve at a port of `bound` within the block, which gets the URL. Open requests then have a while to end."""
    config = uvicorn.Config(
        endpoint.app, log_level="warning", lifespan="off", timeout_graceful_shutdown=_CUT_S, access_log=False
    )
    server = _Server(config)
    with listener:
        serving, up = asyncio.create_task(server.serve(sockets=[listener])), asyncio.create_task(server.up.wait())
        try:
            await asyncio.wait([serving, up], return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                serving.result()
            host, port = listener.getsockname()[:2]
            yield f"http://[{host}]:{port}" if listener.family == socket.AF_INET6 else f"http://{host}:{port}"
        finally:
            up.cancel()
            server.should_exit = True
            await asyncio.wait([serving], timeout=_END_S)
            endpoint.end()
            await asyncio.wait([serving])
