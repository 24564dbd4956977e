"""Commands to a run that goes on, from another process of the same user on its machine.

    tailrace scale RUN rollout=4 ──one line of JSON──▶ RUN/control.sock ──▶ Fleet ──lines of JSON──▶ tailrace

Waiting: the caller waits for the answer, which comes when the change has been made, up to a limit. Lines before it say
what the run waits for. The change goes on where the caller has gone.
"""

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Annotated

import msgspec

from tailrace.config.cluster import MOST_WORKERS, ROLLOUT
from tailrace.errors import UNREADABLE, TailraceError, UserError
from tailrace.registers import run_files

_MOST_BYTES = 65_536
_ASK_S = 10.0
"""Seconds in which a caller has to send its line."""


class Scale(msgspec.Struct, tag="scale", frozen=True):
    """Have so many rollout workers in a pool."""

    workers: Annotated[int, msgspec.Meta(ge=0, le=MOST_WORKERS)]
    pool: str = ROLLOUT


class Waits(msgspec.Struct, tag="waits", frozen=True):
    """What the run waits for until it can answer."""

    text: str


class Reply(msgspec.Struct, tag="reply", frozen=True):
    """The answer to a command."""

    text: str
    """What was done, or why nothing was."""
    ok: bool = True


MakeChange = Callable[[int, str, Callable[[str], None]], Awaitable[str]]
"""See `Fleet.scale`."""


@asynccontextmanager
async def control(run: Path, scale: MakeChange) -> AsyncIterator[None]:
    """Answer commands within the block."""

    answering: set[asyncio.Task[None]] = set()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        answering.add(task)
        task.add_done_callback(answering.discard)
        try:
            async with asyncio.timeout(_ASK_S):
                line = await reader.readline()
            try:
                reply = await _obey(line, scale, lambda text: writer.write(_line(Waits(text))))
            except asyncio.CancelledError:  # at the end of the block
                reply = Reply("the run has ended meanwhile", ok=False)
            writer.write(_line(reply))
            await writer.drain()
        except (TimeoutError, ConnectionError, ValueError):  # it sends no line, too long a one, or has gone
            pass
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    with _short(run) as directory:
        path = f"{directory}/{run_files.CONTROL}"
        with suppress(FileNotFoundError):
            os.unlink(path)  # of a run that was killed; this one holds the directory's lock
        before = os.umask(0o177)
        try:
            server = await asyncio.start_unix_server(answer, path, limit=_MOST_BYTES)
        finally:
            os.umask(before)
        try:
            yield
        finally:
            server.close()
            for task in answering:
                task.cancel()
            if answering:
                await asyncio.wait(answering)
            await server.wait_closed()
            with suppress(FileNotFoundError):
                os.unlink(path)


def _line(message: msgspec.Struct) -> bytes:
    return msgspec.json.encode(message) + b"\n"


async def _obey(line: bytes, scale: MakeChange, on_wait: Callable[[str], None]) -> Reply:
    try:
        command = msgspec.json.decode(line, type=Scale)
    except UNREADABLE as error:
        return Reply(f"this is no command: {error}", ok=False)
    try:
        return Reply(await scale(command.workers, command.pool, on_wait))
    except TailraceError as error:
        return Reply(str(error), ok=False)


def ask(run: Path, command: Scale, *, timeout_s: float, on_wait: Callable[[str], None] = lambda _: None) -> Reply:
    """Send a command to a run, and return its answer.

    Args:
        on_wait: called with what the run waits for.

    Raises:
        UserError: the directory has no run that goes on here, or it has not answered in time.
    """
    deadline = time.monotonic() + timeout_s
    with _short(run) as directory, socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(timeout_s)
        try:
            connection.connect(f"{directory}/{run_files.CONTROL}")
            connection.sendall(_line(command))
            with connection.makefile("rb") as lines:
                while True:
                    said: Waits | Reply = msgspec.json.decode(lines.readline(), type=Waits | Reply)
                    if isinstance(said, Reply):
                        return said
                    on_wait(said.text)
                    connection.settimeout(max(0.001, deadline - time.monotonic()))
        except (FileNotFoundError, ConnectionRefusedError):
            raise UserError(
                f"{run} has no run with workers that goes on on this machine; start one with "
                "pipeline.placement=separated, and use its output_dir"
            ) from None
        except TimeoutError:
            raise UserError(
                f"{run} has not answered within {timeout_s:g} s; it may still make the change; another number ends that"
            ) from None
        except (OSError, msgspec.MsgspecError) as error:
            raise UserError(f"{run} has not answered: {error}; has the run just ended?") from None


@contextmanager
def _short(directory: Path) -> Iterator[str]:
    """A short name of a directory: the path of a socket may have only 107 bytes."""
    try:
        descriptor = os.open(directory, os.O_PATH | os.O_DIRECTORY)
    except OSError as error:
        raise UserError(f"{directory} is no directory of a run: {error.strerror}") from None
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)
