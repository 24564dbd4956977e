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
            _address(logits_NV), rows, width, self._threads, maxima_N.data_ptr(), indexes_N.data_ptr()
        )
        return maxima_N, indexes_N

    def block_sums(self, logits_NV: torch.Tensor, maxima_N: torch.Tensor, scale_N: torch.Tensor) -> torch.Tensor:
        """See `Primitives`."""
        rows, width = logits_NV.shape
        sums_NK = torch.empty(rows, width // BLOCK, dtype=torch.float64)
        maxima, scale = _address(maxima_N), _address(scale_N)
        self._library.sampling_block_sums(
            _address(logits_NV), rows, width, self._threads, maxima, scale, sums_NK.data_ptr()
        )
        return sums_NK

    def choose(
        self, sums_NK: torch.Tensor, uniforms_N: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `Primitives`."""
        rows, blocks = sums_NK.shape
        block_N = torch.empty(rows, dtype=torch.int64)
        inside_N, total_N = torch.empty(2, rows, dtype=torch.float64)
        self._library.sampling_choose(
            _address(sums_NK, torch.float64),
            rows,
            blocks,
            _address(uniforms_N, torch.float64),
            block_N.data_ptr(),
            inside_N.data_ptr(),
            total_N.data_ptr(),
        )
        return block_N, inside_N, total_N

    def resolve(
        self,
        logits_NV: torch.Tensor,
        blocks_N: torch.Tensor,
        inside_N: torch.Tensor,
        maxima_N: torch.Tensor,
        scale_N: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Primitives`."""
        rows, width = logits_NV.shape
        index_N, weight_N = torch.empty(rows, dtype=torch.int64), torch.empty(rows, dtype=torch.float64)
        self._library.sampling_resolve(
            _address(logits_NV),
            rows,
            width,
            _address(blocks_N, torch.int64),
            _address(inside_N, torch.float64),
            _address(maxima_N),
            _address(scale_N),
            index_N.data_ptr(),
            weight_N.data_ptr(),
        )
        return index_N, weight_N


def _library() -> ctypes.CDLL:
    library = load("sampling", needs=AVX512_BF16)
    pointer, number = c_void_p, c_int64
    library.sampling_maxima.argtypes = [pointer, number, number, number, pointer, pointer]
    library.sampling_block_sums.argtypes = [pointer, number, number, number, pointer, pointer, pointer]
    library.sampling_choose.argtypes = [pointer, number, number, pointer, pointer, pointer, pointer]
    library.sampling_resolve.argtypes = [pointer, number, number, *[pointer] * 6]
    for name in ("maxima", "block_sums", "choose", "resolve"):
        getattr(library, f"sampling_{name}").restype = None
    return library


def _address(tensor: torch.Tensor, dtype: torch.dtype = torch.float32) -> int:
    assert tensor.dtype == dtype, f"expected {dtype}, not {tensor.dtype}"
    assert tensor.is_contiguous(), "expected a contiguous tensor"
    return tensor.data_ptr()
