"""Drawing in C++ (`sampling.cpp`), for CPUs with AVX2: one call, since operators on a few numbers cost more."""

import ctypes
from ctypes import c_int, c_int64, c_void_p

import numpy as np
import torch

from tailrace.engine.collectives.base import Collective
from tailrace.engine.kernels.build import VECTORS, load
from tailrace.engine.sampling.drawing import BLOCK, DrawInputs, Drawn, own_tokens


class CpuDrawing:
    """See `drawing.Drawing`. Reads each logit twice and stores nothing of the vocabulary's size."""

    def __init__(self, collective: Collective) -> None:
        """Prepare to draw with as many threads as torch has now. `collective` is of one rank, or has a native exchange.

        Raises:
            KernelUnavailable: the kernels are not available.
        """
        self._library = load_kernel()
        self._threads = torch.get_num_threads()
        self._collective = collective
        native = collective.native
        assert collective.size == 1 or native is not None, "C++ has to be able to call the exchange"
        self._exchange = (native.gather, native.exchange) if native is not None else (None, None)

    def draw(self, inputs: DrawInputs) -> Drawn:
        """See `Drawing`."""
        logits_NV, greedy_N, scale_N, uniforms_N, vocab_size = inputs
        rows, width = logits_NV.shape
        rank, ranks = self._collective.rank, self._collective.size
        drawn = Drawn(np.empty(rows, np.int64), np.empty(rows), np.empty(rows))
        missing = self._library.sampling_draw(
            _address(logits_NV, torch.float32),
            rows,
            width,
            self._threads,
            own_tokens(rank, width, vocab_size),
            -(-vocab_size // BLOCK),
            _address(scale_N, torch.float32),
            _address(greedy_N, torch.bool),
            uniforms_N.ctypes.data,
            rank,
            ranks,
            *self._exchange,
            *(array.ctypes.data for array in drawn),
        )
        self._collective.check(missing)
        return drawn


def load_kernel() -> ctypes.CDLL:
    """Load the drawing in C++.

    Raises:
        KernelUnavailable: the kernels are not available.
    """
    library = load("sampling", needs=VECTORS)
    pointer, number = c_void_p, c_int64
    library.sampling_draw.argtypes = [pointer, *[number] * 5, *[pointer] * 3, *[number] * 2, *[pointer] * 5]
    library.sampling_draw.restype = c_int
    return library


def _address(tensor: torch.Tensor, dtype: torch.dtype) -> int:
    assert tensor.dtype == dtype, f"expected {dtype}, not {tensor.dtype}"
    assert tensor.is_contiguous(), "expected a contiguous tensor"
    return tensor.data_ptr()
