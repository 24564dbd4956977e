"""The messages between a worker's process and its keeper, sent as frames (tailrace/host/frames.py).

Both are the same installation on one machine and trust each other. So values of any type (arguments, results, errors)
are pickled inside the messages.
"""

import asyncio
import pickle
import traceback

import msgspec

from tailrace.cluster.base import foreign, is_ours
from tailrace.errors import TailraceError
from tailrace.events import Event
from tailrace.host.frames import receive_frame


class Start(msgspec.Struct, frozen=True, tag="start"):
    """The first message to a worker: its name, factory, settings and place."""

    name: str
    factory: str
    settings: bytes
    cores: tuple[int, ...] | None
    address: str
    datacentre: str


class Run(msgspec.Struct, frozen=True, tag="run"):
    """Call the worker's `run`."""


class Call(msgspec.Struct, frozen=True, tag="call"):
    """Call a command."""

    id: int
    method: str
    args: bytes
    """A pickled tuple."""


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Cancel a call. It is answered in any case."""

    id: int


class Close(msgspec.Struct, frozen=True, tag="close"):
    """Close the worker, and end the process."""


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """A heartbeat: the worker's event loop turns. It brings the events since the last beat."""

    events: tuple[Event, ...] = ()


class Returned(msgspec.Struct, frozen=True, tag="returned"):
    """The end of a call, or of the method that `id` names: OPEN, RUN or CLOSE."""

    id: int
    value: bytes = b""
    """The pickled result; empty if the method raised."""
    error: bytes = b""
    """A pickled TailraceError; empty if the method returned."""
    cancelled: bool = False


OPEN, RUN, CLOSE = 0, -1, -2
ToWorker = Start | Run | Call | Cancel | Close
ToKeeper = Beat | Returned
_to_worker = msgspec.msgpack.Decoder(ToWorker)
_to_keeper = msgspec.msgpack.Decoder(ToKeeper)


async def read_to_worker(reader: asyncio.StreamReader) -> ToWorker | None:
    """Read the next message to a worker; None when its keeper has hung up."""
    body = await _read(reader)
    return None if body is None else _to_worker.decode(body)


async def read_to_keeper(reader: asyncio.StreamReader) -> ToKeeper | None:
    """Read the next message to a keeper; None when its worker has hung up."""
    body = await _read(reader)
    return None if body is None else _to_keeper.decode(body)


async def _read(reader: asyncio.StreamReader) -> bytes | None:
    try:
        return await receive_frame(reader)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def pack_error(worker: str, error: Exception) -> bytes:
    """Pickle `error` with its traceback in a note. An error that is not Tailrace's becomes a WorkerError."""
    ours = error if is_ours(error) else foreign(worker, error)
    ours.add_note(f"In worker {worker}:\n{''.join(traceback.format_exception(error)).rstrip()}")
    return pickle.dumps(ours)


def unpack_error(packed: bytes) -> TailraceError:
    """Return the error that `pack_error` pickled."""
    error = pickle.loads(packed)
    assert isinstance(error, TailraceError)
    return error
