"""CUDA graphs of decoding steps, captured when a size first occurs.

A decoding step launches hundreds of small kernels, and on a fast GPU launching takes longer than computing. A graph
launches them all at once, but only for fixed shapes and addresses. So steps are padded to a few sizes, and each size
has its own input buffer and graph.

A padded row repeats the first one: it computes what that row does and writes the same to the same place of the cache.
A padded column of the block tables names block 0, which no row sees there.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from tailrace.engine.decoder.base import Ints
from tailrace.errors import ConfigError

WARM_UPS = 2
"""Runs before a capture. In the first runs libraries set themselves up, which a graph cannot hold."""
ROWS_STEP = 16
"""Sizes beyond this are multiples of it; smaller ones are powers of two."""


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    inputs_BX: torch.Tensor
    logits_BV: torch.Tensor


class DecodeGraphs:
    """Runs `decode`, which takes a [B, 2 + W] tensor (`decode_inputs`), through graphs of padded sizes."""

    def __init__(self, decode: Callable[[torch.Tensor], torch.Tensor], device: torch.device) -> None:
        """Prepare to capture; nothing is captured yet.

        Raises:
            ConfigError: the device is not CUDA.
        """
        if device.type != "cuda":
            raise ConfigError(f"engine.cuda_graphs needs a CUDA device, not {device.type}; set it to false")
        self._decode = decode
        self._device = device
        self._captured: dict[tuple[int, int], _Captured] = {}

    def __call__(self, inputs_BX: Ints) -> torch.Tensor:
        """Return [B, V_local] fp32 logits, which the next call overwrites."""
        padded = pad_decode(inputs_BX)
        captured = self._captured.get(padded.shape)
        if captured is None:
            captured = self._captured[padded.shape] = self._capture(padded)
        captured.inputs_BX.copy_(torch.from_numpy(padded))
        captured.graph.replay()
        return captured.logits_BV[: len(inputs_BX)]

    def _capture(self, padded_BX: Ints) -> _Captured:
        """Capture the graph of this size. The step runs on the way, which is harmless: it will write the same again."""
        with torch.cuda.device(self._device):  # a graph captures what happens on the current device
            return self._captured_here(padded_BX)

    def _captured_here(self, padded_BX: Ints) -> _Captured:
        inputs_BX = torch.from_numpy(padded_BX).to(self._device)
        side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                self._decode(inputs_BX)
        torch.cuda.current_stream(self._device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        pool = next((other.graph.pool() for other in self._captured.values()), None)
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):  # NCCL has threads of its own
            logits_BV = self._decode(inputs_BX)
        return _Captured(graph, inputs_BX, logits_BV)


def pad_decode(inputs_BX: Ints) -> Ints:
    """Pad the inputs to the size of the graph that runs them."""
    rows, columns = inputs_BX.shape
    width = columns - 2
    padded = np.zeros((padded_rows(rows), 2 + padded_width(width)), np.int64)
    padded[:rows, :columns] = inputs_BX
    padded[rows:] = padded[0]
    return padded


def padded_rows(rows: int) -> int:
    """Round up to 1, 2, 4, 8, 16, 32, 48, …"""
    return _power_of_two(rows) if rows <= ROWS_STEP else -(-rows // ROWS_STEP) * ROWS_STEP


def padded_width(width: int) -> int:
    """Round up to 1, 2, 4, 8, 16, 32, …: gathering cache that no row sees costs at most as much again."""
    return _power_of_two(width)


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()
