"""A version of the weights: a manifest, which describes the layout, and a payload that travels in chunks.

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
"""Tensors begin, and chunks end, at multiples of this many bytes."""
_PIECE_BYTES = 2**19
"""The most bytes that are copied before they are summed: they are still in the cache, and the pieces are few."""

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}


class TensorEntry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The type, shape and place of one tensor."""

    name: str
    dtype: str
    shape: Annotated[tuple[Count, ...], Meta(max_length=16)]
    offset: Count

    @property
    def nbytes(self) -> int:
        """The bytes of the tensor's elements."""
        return math.prod(self.shape) * _DTYPES[self.dtype].itemsize


class Manifest(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The layout of a version's payload."""

    serial: Annotated[int, Meta(ge=1, le=2**63 - 1)]
    """The number of this publication; each sender counts its own from 1."""
    version: Count
    nbytes: Annotated[int, Meta(ge=0, le=2**48)]
    """The size of the payload."""
    chunk_bytes: Annotated[int, Meta(ge=ALIGNMENT, le=MAX_FRAME_BYTES)]
    entries: tuple[TensorEntry, ...]

    @property
    def chunks(self) -> int:
        """The number of chunks."""
        return -(-self.nbytes // self.chunk_bytes)

    def span(self, chunk: int) -> slice:
        """The place of a chunk in the payload."""
        return slice(chunk * self.chunk_bytes, min(self.nbytes, (chunk + 1) * self.chunk_bytes))


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Manifest)


def sum_of(data: bytes | memoryview) -> bytes:
    """The 64-bit xxh3 sum of some bytes."""
    return xxhash.xxh3_64_digest(data)


def plan_payload(
    serial: int, version: int, tensors: Mapping[str, torch.Tensor], *, dtype: torch.dtype | None, chunk_bytes: int
) -> Manifest:
    """Lay out the tensors in a payload. `dtype`: the type in which floats travel; None keeps each tensor's own.

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
    """Encode a manifest for sending."""
    return _ENCODER.encode(manifest)


def decode_manifest(data: bytes, expected: bytes) -> Manifest:
    """Decode a manifest whose sum is `expected`.

    Raises:
        WeightsError: the sum differs, or the manifest is invalid.
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
    """A version that is here, wholly or in part. One thread adds chunks; others may read."""

    def __init__(self, manifest: Manifest, encoded: bytes, segment: Segment) -> None:
        """Start without chunks. `segment` holds the payload's bytes, or room for them."""
        self.manifest = manifest
        self.encoded = encoded
        self.segment = segment
        self.memory = segment.payload[: manifest.nbytes]
        self._sums: list[bytes | None] = [None] * manifest.chunks
        self.ready = 0
        """The number of chunks that are here without a gap, counted from the first."""
        self.wake_at = math.inf
        """The number of ready chunks that somebody waits for; infinity while nobody waits."""

    def add(self, chunk: int, value: bytes) -> None:
        """Record that the bytes of a chunk are in place and have this sum."""
        self._sums[chunk] = value
        while self.ready < len(self._sums) and self._sums[self.ready] is not None:
            self.ready += 1

    def sum(self, chunk: int) -> bytes | None:
        """The sum of a chunk that is here; None for one that is not."""
        return self._sums[chunk]

    def sums(self, start: int) -> bytes:
        """The sums of the chunks from `start` up to `ready`, packed."""
        return b"".join(value for value in self._sums[start : self.ready] if value is not None)

    @property
    def whole(self) -> bool:
        """Whether every chunk is here; the seal tells whether they are right."""
        return self.ready == len(self._sums)

    def seal(self) -> bytes:
        """The seal of a whole version; see the module's docstring."""
        return sum_of(sum_of(self.encoded) + self.sums(0))

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors by name, as views of the payload that must not be written to."""
        return tensor_views(self.manifest, self.payload())

    def payload(self) -> torch.Tensor:
        """A view `[nbytes]` of uint8 of the payload's memory."""
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
    """Split packed sums.

    Raises:
        WeightsError: the length is not a multiple of `SUM_BYTES`.
    """
    if len(data) % SUM_BYTES:
        raise WeightsError(f"{len(data)} bytes are not sums of {SUM_BYTES} each")
    return [data[start : start + SUM_BYTES] for start in range(0, len(data), SUM_BYTES)]


class Piece(NamedTuple):
    """Consecutive elements of a tensor in one chunk."""

    entry: int
    """The tensor's number in the manifest."""
    part: slice
    """The elements, as a slice of the flat tensor."""
    room: slice
    """The place of the elements, counted in elements from the beginning of the payload."""
    end: int
    """The end of the elements, in bytes from the beginning of the payload."""


def pieces_by_chunk(manifest: Manifest) -> list[list[Piece]]:
    """The contents of each chunk, in pieces that stay in a core's cache."""
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
        """`sources`: the manifest's tensors in its order, in any dtype and on any device."""
        self._stored = stored
        payload = stored.payload()
        self._copiers = [
            _copier(payload, source.reshape(-1), _DTYPES[entry.dtype])
            for entry, source in zip(stored.manifest.entries, sources, strict=True)
        ]

    def write(self, chunk: int, pieces: Sequence[Piece]) -> None:
        """Write a chunk, cut into `pieces`, to its place."""
        memory, span = self._stored.memory, self._stored.manifest.span(chunk)
        running, done = xxhash.xxh3_64(), span.start
        for number, part, room, end in pieces:
            copy, target, source = self._copiers[number]
            copy(target[room], source[part])
            running.update(memory[done:end])  # including the gap before it
            done = end
        running.update(memory[done : span.stop])
        self._stored.add(chunk, running.digest())


def _copier(
    payload: torch.Tensor, flat: torch.Tensor, dtype: torch.dtype
) -> tuple[Callable[[Any, Any], object], Any, Any]:
    """The copy function, its target and its source. Numpy copies plain bytes: it takes less time for each piece."""
    if flat.dtype != dtype or flat.device.type != "cpu" or not flat.is_contiguous():
        return torch.Tensor.copy_, payload.view(dtype), flat
    size = dtype.itemsize  # numpy has no bfloat16
    return np.copyto, payload.numpy().reshape(-1, size), flat.view(torch.uint8).numpy().reshape(-1, size)
