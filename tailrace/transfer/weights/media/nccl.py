"""Versions by the broadcasts of a process group: nccl between GPUs. That has never run; gloo on CPUs runs in the tests.

    rank 0 ──length and sum of the manifest──▶ manifest ──▶ chunk, chunk, … ──▶ sums ──▶ all other ranks, at once

It stands beside `Medium` and is not one: a broadcast is a call that all ranks make together. There is no tree, nobody
can be away, and nothing is fetched again: what does not verify is an error, and is not given out. A rank that dies
fails the others after the group's own limit.
"""

from collections.abc import Iterable
from typing import Any

import torch

from tailrace.errors import WeightsError, one_line
from tailrace.transfer.weights.messages import SUM_BYTES
from tailrace.transfer.weights.versions import (
    Manifest,
    decode_manifest,
    encode_manifest,
    packed_sums,
    plan_payload,
    sum_of,
    views,
)
from tailrace.types import WeightVersion

_LENGTH_BYTES = 8
_MAX_MANIFEST_BYTES = 2**28


class GroupBroadcast:
    """One rank of a process group that is used for nothing else meanwhile."""

    def __init__(self, group: Any, *, device: torch.device, chunk_mib: float = 64.0) -> None:
        """`group`: of torch.distributed, whose rank 0 sends. `device`: what its backend works on."""
        self._group = group
        self._device = device
        self._chunk_bytes = int(chunk_mib * 2**20)

    def send(
        self, version: WeightVersion, tensors: Iterable[tuple[str, torch.Tensor]], *, dtype: torch.dtype | None = None
    ) -> None:
        """For rank 0: give a version to all others. `dtype`: of floats as they travel.

        Raises:
            WeightsError: a dtype does not travel, or the exchange failed.
        """
        sources = {name: tensor.detach() for name, tensor in tensors}
        manifest = plan_payload(1, version, sources, dtype=dtype, chunk_bytes=self._chunk_bytes)
        payload = self._host(manifest)
        for target, source in zip(views(manifest, payload).values(), sources.values(), strict=True):
            target.copy_(source)
        encoded = encode_manifest(manifest)
        self._send(len(encoded).to_bytes(_LENGTH_BYTES, "little") + sum_of(encoded))
        self._send(encoded)
        for chunk in range(manifest.chunks):
            self._exchange(payload[manifest.span(chunk)].to(self._device))
        self._send(b"".join(_sums(manifest, payload)))

    def receive(self) -> tuple[WeightVersion, dict[str, torch.Tensor]]:
        """For other ranks: the next version, in memory of the CPU.

        Raises:
            WeightsError: it did not verify, or the exchange failed.
        """
        head = self._receive(_LENGTH_BYTES + SUM_BYTES)
        length = int.from_bytes(head[:_LENGTH_BYTES], "little")
        if length > _MAX_MANIFEST_BYTES:
            raise WeightsError(f"a manifest of {length} bytes is announced: the ranks made different calls")
        manifest = decode_manifest(self._receive(length), head[_LENGTH_BYTES:])
        payload = self._host(manifest)
        for chunk in range(manifest.chunks):
            part = payload[manifest.span(chunk)]
            part.copy_(self._exchange(torch.empty_like(part, device=self._device)))
        expected = packed_sums(self._receive(manifest.chunks * SUM_BYTES))
        for chunk, (got, value) in enumerate(zip(_sums(manifest, payload), expected, strict=True)):
            if got != value:
                raise WeightsError(f"chunk {chunk} of version {manifest.version} arrived corrupt")
        return manifest.version, views(manifest, payload)

    def _host(self, manifest: Manifest) -> torch.Tensor:
        return torch.zeros(manifest.nbytes, dtype=torch.uint8, pin_memory=self._device.type == "cuda")

    def _send(self, data: bytes) -> None:
        self._exchange(torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self._device))

    def _receive(self, length: int) -> bytes:
        return self._exchange(torch.empty(length, dtype=torch.uint8, device=self._device)).cpu().numpy().tobytes()

    def _exchange(self, data: torch.Tensor) -> torch.Tensor:
        try:
            if data.numel():
                self._group.broadcast([data]).wait()
        except RuntimeError as error:
            raise WeightsError(
                f"weights were not broadcast, for another rank died or is late: {one_line(error)}"
            ) from error
        return data


def _sums(manifest: Manifest, payload: torch.Tensor) -> Iterable[bytes]:
    memory = memoryview(payload.numpy().data)
    return (sum_of(memory[manifest.span(chunk)]) for chunk in range(manifest.chunks))
