"""A version of the weights: a manifest, which says what lies where, and a payload that travels in chunks.

manifest   names, dtypes, shapes, offsets           its sum is announced by the sender
payload    [ tensor ][ tensor ]…                    cut into chunks of equal size, each with its sum
seal       the sum of the manifest's sum and those of all chunks, announced when the last is written
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
import torch
import xxhash
from msgspec import Meta

from tailrace.errors import WeightsError, one_line
from tailrace.transfer.weights.messages import SUM_BYTES
from tailrace.transfer.weights.segments import Segment
from tailrace.transfer.wire.frames import MAX_FRAME_BYTES
from tailrace.transfer.wire.messages import Count

ALIGNMENT = 64
"""Bytes; tensors begin, and chunks end, at multiples of it."""
_PIECE_BYTES = 2**19
"""So much is copied before it is summed: it is still in the cache, and there are few enough pieces to go through."""

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}


class TensorEntry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One tensor."""

    name: str
    dtype: str
    shape: Annotated[tuple[Count, ...], Meta(max_length=16)]
    offset: Count

    @property
    def nbytes(self) -> int:
        """Of its elements."""
        return math.prod(self.shape) * _DTYPES[self.dtype].itemsize


class Manifest(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What lies where in the payload of a version."""

    serial: Annotated[int, Meta(ge=1, le=2**63 - 1)]
    """Counts the publications of a sender."""
    version: Count
    nbytes: Annotated[int, Meta(ge=0, le=2**48)]
    """Of the payload."""
    chunk_bytes: Annotated[int, Meta(ge=ALIGNMENT, le=MAX_FRAME_BYTES)]
    entries: tuple[TensorEntry, ...]

    @property
    def chunks(self) -> int:
        """Their number."""
        return -(-self.nbytes // self.chunk_bytes)

    def span(self, chunk: int) -> slice:
        """Where a chunk lies in the payload."""
        return slice(chunk * self.chunk_bytes, min(self.nbytes, (chunk + 1) * self.chunk_bytes))


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Manifest)


def sum_of(data: bytes | memoryview) -> bytes:
    """The sum of some bytes."""
    return xxhash.xxh3_64_digest(data)


def plan_payload(
    serial: int, version: int, tensors: Mapping[str, torch.Tensor], *, dtype: torch.dtype | None, chunk_bytes: int
) -> Manifest:
    """Where each tensor goes. `dtype`: of floats as they travel; None leaves them as they are.

    Raises:
        WeightsError: a tensor has a dtype that does not travel.
    """
    entries, end = [], 0
    for name, tensor in tensors.items():
        wire = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        word = str(wire).removeprefix("torch.")
        if word not in _DTYPES:
            raise WeightsError(f"{name} is of dtype {word}, which does not travel; give one of {', '.join(_DTYPES)}")
        entries.append(TensorEntry(name, word, tuple(tensor.shape), end))
        end += -(-entries[-1].nbytes // ALIGNMENT) * ALIGNMENT
    return Manifest(serial, version, end, chunk_bytes, tuple(entries))


def encode_manifest(manifest: Manifest) -> bytes:
    """A manifest as it travels."""
    return _ENCODER.encode(manifest)


def decode_manifest(data: bytes, expected: bytes) -> Manifest:
    """A manifest whose sum is `expected`.

    Raises:
        WeightsError: it has another sum, or is not as it must be.
    """
    if sum_of(data) != expected:
        raise WeightsError(f"a manifest of {len(data)} bytes arrived corrupt")
    try:
        manifest = _DECODER.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise WeightsError(f"{len(data)} bytes are not a manifest: {one_line(error)}") from None
    for entry in manifest.entries:
        if entry.dtype not in _DTYPES or entry.offset % ALIGNMENT or entry.offset + entry.nbytes > manifest.nbytes:
            raise WeightsError(f"the manifest's {entry.name} does not lie in its payload of {manifest.nbytes} bytes")
    return manifest


class StoredVersion:
    """A version that is here, wholly or in part. One thread adds chunks; others may look."""

    def __init__(self, manifest: Manifest, encoded: bytes, segment: Segment) -> None:
        """Nothing of it is here yet. `segment` holds the payload's bytes, or room for them."""
        self.manifest = manifest
        self.encoded = encoded
        self.segment = segment
        self.memory = segment.payload[: manifest.nbytes]
        self._sums: list[bytes | None] = [None] * manifest.chunks
        self.ready = 0
        """So many chunks from the first on are here."""
        self.wake_at = math.inf
        """When so many are ready, somebody waits for it."""

    def add(self, chunk: int, value: bytes) -> None:
        """The bytes of a chunk are in place, and have this sum."""
        self._sums[chunk] = value
        while self.ready < len(self._sums) and self._sums[self.ready] is not None:
            self.ready += 1

    def sum(self, chunk: int) -> bytes | None:
        """Of a chunk that is here; None for one that is not."""
        return self._sums[chunk]

    def sums(self, start: int) -> bytes:
        """Of the chunks from `start` up to `ready`, packed."""
        return b"".join(value for value in self._sums[start : self.ready] if value is not None)

    @property
    def whole(self) -> bool:
        """Whether every chunk is here; the seal says whether they are the right ones."""
        return self.ready == len(self._sums)

    def seal(self) -> bytes:
        """The seal of a whole version, see the module."""
        return sum_of(sum_of(self.encoded) + self.sums(0))

    def tensors(self) -> dict[str, torch.Tensor]:
        """By name: views of the payload, not to be written to."""
        return tensor_views(self.manifest, self.payload())

    def payload(self) -> torch.Tensor:
        """`[nbytes]` of uint8: a view of the memory."""
        nbytes = self.manifest.nbytes
        return torch.frombuffer(self.memory, dtype=torch.uint8) if nbytes else torch.empty(0, dtype=torch.uint8)


def tensor_views(manifest: Manifest, payload: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors of a version, by name, in its payload `[nbytes]` of uint8."""
    tensors = {}
    for entry in manifest.entries:
        part = payload[entry.offset : entry.offset + entry.nbytes]
        tensors[entry.name] = part.view(_DTYPES[entry.dtype]).view(entry.shape)
    return tensors


def packed_sums(data: bytes) -> list[bytes]:
    """Sums that were packed.

    Raises:
        WeightsError: the bytes are no sums.
    """
    if len(data) % SUM_BYTES:
        raise WeightsError(f"{len(data)} bytes are not sums of {SUM_BYTES} each")
    return [data[start : start + SUM_BYTES] for start in range(0, len(data), SUM_BYTES)]


class Piece(NamedTuple):
    """Consecutive elements of a tensor in one chunk."""

    entry: int
    """Its number in the manifest."""
    part: slice
    """Of the tensor's elements."""
    room: slice
    """Where they go, counted in such elements from the beginning of the payload."""
    end: int
    """Where they end, in bytes from there."""


def pieces_by_chunk(manifest: Manifest) -> list[list[Piece]]:
    """What lies in each chunk, in pieces that stay in a core's cache."""
    chunks: list[list[Piece]] = [[] for _ in range(manifest.chunks)]
    for number, entry in enumerate(manifest.entries):
        size = _DTYPES[entry.dtype].itemsize
        here, last, first = entry.offset, entry.offset + entry.nbytes, entry.offset // size
        while here < last:
            chunk = here // manifest.chunk_bytes
            end = min(last, manifest.span(chunk).stop, here + _PIECE_BYTES)
            room = slice(here // size, end // size)
            chunks[chunk].append(Piece(number, slice(room.start - first, room.stop - first), room, end))
            here = end
    return chunks


class Writer:
    """Copies tensors into the memory of a stored version, and sums each piece while it is in the cache."""

    def __init__(self, stored: StoredVersion, sources: Sequence[torch.Tensor]) -> None:
        """`sources`: those of the manifest, in any dtype and on any device."""
        self._stored = stored
        payload = stored.payload()
        self._copiers = [
            _copier(payload, source.reshape(-1), _DTYPES[entry.dtype])
            for entry, source in zip(stored.manifest.entries, sources, strict=True)
        ]

    def write(self, chunk: int, pieces: Sequence[Piece]) -> None:
        """Put a chunk, cut into `pieces`, in its place."""
        memory, span = self._stored.memory, self._stored.manifest.span(chunk)
        running, done = xxhash.xxh3_64(), span.start
        for number, part, room, end in pieces:
            copy, target, source = self._copiers[number]
            copy(target[room], source[part])
            running.update(memory[done:end])  # with the gap before it
            done = end
        running.update(memory[done : span.stop])
        self._stored.add(chunk, running.digest())


def _copier(
    payload: torch.Tensor, flat: torch.Tensor, dtype: torch.dtype
) -> tuple[Callable[[Any, Any], object], Any, Any]:
    """How to copy, and from where to where; plain bytes go by numpy, which takes less time for each piece."""
    if flat.dtype != dtype or flat.device.type != "cpu" or not flat.is_contiguous():
        return torch.Tensor.copy_, payload.view(dtype), flat
    size = dtype.itemsize  # numpy has no bfloat16
    return np.copyto, payload.numpy().reshape(-1, size), flat.view(torch.uint8).numpy().reshape(-1, size)
