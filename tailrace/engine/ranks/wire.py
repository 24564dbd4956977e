"""The messages between the driver and the process of a rank, in frames (tailrace/host/frames.py).

driver → process   Start, then the others in any order, each when the one before it has been answered
process → driver   one Answer to each
"""

import socket
import time
from array import array
from contextlib import suppress
from typing import TypeVar

import msgspec

from tailrace.engine.ranks.reshard import SwitchTimes
from tailrace.engine.ranks.staging import Place
from tailrace.engine.scheduling.migration import Migration
from tailrace.engine.scheduling.step import StepInput, StepOutput
from tailrace.host.frames import LENGTH, frame
from tailrace.models.architecture import Architecture

_DESCRIPTOR_BYTES = array("i").itemsize


class Start(msgspec.Struct, frozen=True, array_like=True, tag=True, kw_only=True):
    """Make a rank."""

    config: str
    """A NativeEngineConfig, as JSON."""
    architecture: Architecture
    """The architecture of the whole model."""
    rank: int
    """The rank's number among all ranks of the engine."""
    device: str
    threads: int
    rendezvous: str
    """The directory of a `Rendezvous`; empty for a rank alone."""
    timeout_s: float
    """The longest that a rank may wait for another."""
    environment: dict[bytes, bytes]
    """The driver's environment."""
    cores: list[int]
    """The cores that the rank may run on; empty where the operating system does not tell."""


class Load(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Load the weights in the file whose descriptor comes along."""

    places: dict[str, Place]


class Step(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Execute a step."""

    input: StepInput


class Measure(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Report how much memory there is to spare."""


class Meet(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Make communication groups."""

    places: dict[int, str]
    """The directory of the `Rendezvous`, by degree."""


class AllReduce(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Sum fp32 tensors with the ranks of the replica, and report how long that takes."""

    count: int
    """Entries of a tensor."""
    times: int


class Switch(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Become a shard of another degree."""

    degree: int
    migrations: list[Migration]
    """See `Rank.switch`."""


class ReadCache(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Return the keys and values in these blocks, of the shard's own KV heads."""

    blocks: list[int]


class WriteCache(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Put keys and values of the shard's own KV heads into these blocks."""

    blocks: list[int]
    data: bytearray
    """As of `CacheBytes`."""


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """An error of a rank that lives."""

    kind: str
    """The name of a class in tailrace.errors."""
    message: str


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """The answer to an order."""

    output: StepOutput | None = None
    """The output of a step, from shard 0; the other shards have the same."""
    failure: Failure | None = None
    spare_bytes: int | None = None
    """Bytes of memory that the rank may still take: its device's, or its share of the machine's."""
    seconds: float | None = None
    """The median seconds of an all-reduce."""
    times: SwitchTimes | None = None
    """The times of a switch."""
    cache: bytearray | None = None
    """As of `CacheBytes`."""


Order = Start | Load | Step | Measure | Meet | AllReduce | Switch | ReadCache | WriteCache
Message = TypeVar("Message")

_ORDERS: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order)
_ANSWERS = msgspec.msgpack.Decoder(Answer)


class Channel:
    """An end of the connection between the driver and a rank process."""

    def __init__(self, stream: socket.socket) -> None:
        self._stream = stream

    def fileno(self) -> int:
        """The descriptor, which is readable when a message has come, or the other end is gone."""
        return self._stream.fileno()

    def send(self, message: Order | Answer, *, descriptor: int | None = None, limit_s: float | None = None) -> None:
        """Send `message`, with a file descriptor of which the other end gets a copy.

        Raises:
            ConnectionError: the other end is gone.
            TimeoutError: the other end has not taken the message within `limit_s`.
        """
        data = frame(message)
        passed = [] if descriptor is None else [descriptor]
        self._stream.settimeout(limit_s)
        sent = socket.send_fds(self._stream, [data], passed)
        self._stream.sendall(memoryview(data)[sent:])

    def receive_order(self) -> tuple[Order, int | None]:
        """Receive the next order, and the file descriptor that came with it.

        Raises:
            ConnectionError: the other end is gone.
        """
        descriptors = array("i")
        order = self._receive(_ORDERS, None, descriptors)
        return order, descriptors[0] if descriptors else None

    def receive_answer(self, *, limit_s: float) -> Answer:
        """Receive the next answer.

        Raises:
            ConnectionError: the other end is gone.
            TimeoutError: not all of it has come within `limit_s`.
        """
        return self._receive(_ANSWERS, time.monotonic() + limit_s, array("i"))

    def hang_up(self) -> None:
        """Let both ends see the end of the connection. Callable from any thread; `close` must still follow."""
        with suppress(OSError):  # it is closed, or the other end is
            self._stream.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Hang up. Closing twice is harmless."""
        self._stream.close()

    def _receive(
        self, decoder: msgspec.msgpack.Decoder[Message], deadline: float | None, descriptors: "array[int]"
    ) -> Message:
        (length,) = LENGTH.unpack(self._read(LENGTH.size, deadline, descriptors))
        return decoder.decode(self._read(length, deadline, descriptors))

    def _read(self, size: int, deadline: float | None, descriptors: "array[int]") -> bytearray:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            self._stream.settimeout(None if deadline is None else max(deadline - time.monotonic(), 0.001))
            count, ancillary, _, _ = self._stream.recvmsg_into(
                [view], socket.CMSG_SPACE(_DESCRIPTOR_BYTES), socket.MSG_CMSG_CLOEXEC
            )
            if count == 0:
                raise ConnectionResetError("the other end hung up")
            for _, _, passed in ancillary:
                descriptors.frombytes(passed)
            view = view[count:]
        return data
