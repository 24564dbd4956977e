"""The endpoint at a port of this machine."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext

import uvicorn

from tailrace.errors import UserError
from tailrace.rollout.http.app import Endpoint

_END_S = 5
"""Seconds for open requests to end, when the server does."""


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


@asynccontextmanager
async def listening(endpoint: Endpoint, *, host: str, port: int) -> AsyncIterator[str]:
    """Serve within the block, which gets the URL. `port`: 0 takes a free one.

    Raises:
        UserError: the port cannot be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            raise UserError(f"port {port} of {host} cannot be had: {error.strerror}; choose another --port") from None
        config = uvicorn.Config(
            endpoint.app, log_level="warning", lifespan="off", timeout_graceful_shutdown=_END_S, access_log=False
        )
        server = _Server(config)
        serving, up = asyncio.create_task(server.serve(sockets=[listener])), asyncio.create_task(server.up.wait())
        try:
            await asyncio.wait([serving, up], return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                serving.result()
            name = f"[{host}]" if family == socket.AF_INET6 else host
            yield f"http://{name}:{listener.getsockname()[1]}"
        finally:
            up.cancel()
            server.should_exit = True
            await asyncio.wait([serving])
