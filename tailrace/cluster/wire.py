"""What a worker's process and its keeper tell each other, in frames (tailrace/host/frames.py).

Both are the same installation on one machine and trust each other, so what the contract leaves open (arguments,
results, errors) is pickled inside.
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
    """The first message to a worker: what to be."""

    name: str
    factory: str
    settings: bytes
    cores: tuple[int, ...] | None
    address: str
    datacentre: str


class Run(msgspec.Struct, frozen=True, tag="run"):
    """Begin to serve."""


class Call(msgspec.Struct, frozen=True, tag="call"):
    """Call a command."""

    id: int
    method: str
    args: bytes
    """A pickled tuple."""


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """End a call, which is answered in any case."""

    id: int


class Close(msgspec.Struct, frozen=True, tag="close"):
    """Close and end."""


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """The event loop of the worker goes round. Brings the events since the last one."""

    events: tuple[Event, ...] = ()


class Returned(msgspec.Struct, frozen=True, tag="returned"):
    """A call has ended, or what its id names: OPEN, RUN, CLOSE."""

    id: int
    value: bytes = b""
    """Pickled; nothing when it raised."""
    error: bytes = b""
    """A pickled TailraceError; nothing when it returned."""
    cancelled: bool = False


OPEN, RUN, CLOSE = 0, -1, -2
ToWorker = Start | Run | Call | Cancel | Close
ToKeeper = Beat | Returned
_to_worker = msgspec.msgpack.Decoder(ToWorker)
_to_keeper = msgspec.msgpack.Decoder(ToKeeper)


async def read_to_worker(reader: asyncio.StreamReader) -> ToWorker | None:
    """The next message to a worker; None when its keeper has hung up."""
    body = await _read(reader)
    return None if body is None else _to_worker.decode(body)


async def read_to_keeper(reader: asyncio.StreamReader) -> ToKeeper | None:
    """The next message to a keeper; None when its worker has hung up."""
    body = await _read(reader)
    return None if body is None else _to_keeper.decode(body)


async def _read(reader: asyncio.StreamReader) -> bytes | None:
    try:
        return await receive_frame(reader)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def pack_error(worker: str, error: Exception) -> bytes:
    """`error` for another process, with its traceback in a note; a WorkerError if it is none of Tailrace's."""
    ours = error if is_ours(error) else foreign(worker, error)
    ours.add_note(f"In worker {worker}:\n{''.join(traceback.format_exception(error)).rstrip()}")
    return pickle.dumps(ours)


def unpack_error(packed: bytes) -> TailraceError:
    """What `pack_error` packed."""
    error = pickle.loads(packed)
    assert isinstance(error, TailraceError)
    return error
