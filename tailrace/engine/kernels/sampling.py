"""The sampler's passes over the logits in C++ (`sampling.cpp`), for CPUs with AVX512-BF16."""

import ctypes
from ctypes import c_int64, c_void_p

import torch

from tailrace.engine.kernels.build import AVX512_BF16, load
from tailrace.engine.sampler import BLOCK


class CpuPrimitives:
    """See `sampler.Primitives`. Reads each logit once in a pass and stores nothing of the vocabulary's size."""

    def __init__(self) -> None:
        """Uses as many threads as torch does now.

        Raises:
            KernelUnavailable: the kernels cannot be had.
        """
        self._library = _library()
        self._threads = torch.get_num_threads()

    def maxima(self, logits_NV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Primitives`. NaNs are passed over."""
        rows, width = logits_NV.shape
        maxima_N, indexes_N = torch.empty(rows), torch.empty(rows, dtype=torch.int64)
        self._library.sampling_maxima(
            _floats(logits_NV), rows, width, self._threads, maxima_N.data_ptr(), indexes_N.data_ptr()
        )
        return maxima_N, indexes_N

    def block_sums(self, logits_NV: torch.Tensor, maxima_N: torch.Tensor, scale_N: torch.Tensor) -> torch.Tensor:
        """See `Primitives`."""
        rows, width = logits_NV.shape
        sums_NK = torch.empty(rows, width // BLOCK, dtype=torch.float64)
        maxima, scale = _floats(maxima_N), _floats(scale_N)
        self._library.sampling_block_sums(
            _floats(logits_NV), rows, width, self._threads, maxima, scale, sums_NK.data_ptr()
        )
        return sums_NK

    def block_weights(
        self, logits_NV: torch.Tensor, blocks_N: torch.Tensor, maxima_N: torch.Tensor, scale_N: torch.Tensor
    ) -> torch.Tensor:
        """See `Primitives`."""
        rows, width = logits_NV.shape
        weights_NB = torch.empty(rows, BLOCK)
        blocks_N = blocks_N.contiguous()
        assert blocks_N.dtype == torch.int64, "blocks are indexes"
        maxima, scale = _floats(maxima_N), _floats(scale_N)
        self._library.sampling_block_weights(
            _floats(logits_NV), rows, width, blocks_N.data_ptr(), maxima, scale, weights_NB.data_ptr()
        )
        return weights_NB


def _library() -> ctypes.CDLL:
    library = load("sampling", needs=AVX512_BF16)
    pointer, number = c_void_p, c_int64
    library.sampling_maxima.argtypes = [pointer, number, number, number, pointer, pointer]
    library.sampling_block_sums.argtypes = [pointer, number, number, number, pointer, pointer, pointer]
    library.sampling_block_weights.argtypes = [pointer, number, number, pointer, pointer, pointer, pointer]
    for function in (library.sampling_maxima, library.sampling_block_sums, library.sampling_block_weights):
        function.restype = None
    return library


def _floats(tensor: torch.Tensor) -> int:
    """Its address."""
    assert tensor.dtype == torch.float32, f"expected float32, not {tensor.dtype}"
    assert tensor.is_contiguous(), "expected a contiguous tensor"
    return tensor.data_ptr()
