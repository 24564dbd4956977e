"""The decoder in C++ (`kernels/decoder.cpp`), for CPUs with AVX2. It is faster with AVX512, AVX512-BF16 and AMX.

Python makes one call for each weight to pack. A step takes one call, or two a layer where C++ cannot call the ranks'
exchange. Sums are taken in the same order whatever the batch. So a token's logits are the same bit for bit alone, in a
batch, in a chunk of a prompt of any size, and over prompt blocks that others filled.
"""

import ctypes
import time
from collections.abc import Mapping
from ctypes import POINTER, byref, c_double, c_int, c_int64, c_void_p

import numpy as np
import numpy.typing as npt
import torch

from tailrace.engine.collectives.base import Collective
from tailrace.engine.decoder.base import Batch, Decoder
from tailrace.engine.decoder.packing import Format, Group, Packing
from tailrace.engine.kernels.build import VECTORS, KernelUnavailable, load
from tailrace.engine.kv_cache import KVCache
from tailrace.engine.model.rope import inverse_frequencies
from tailrace.engine.sampling.cpu import CpuDrawing, load_kernel
from tailrace.engine.sampling.drawing import TorchDrawing
from tailrace.models.architecture import Architecture

LANES = 16
MOST_HEAD_DIM = 256
SECTIONS = ("embed", "qkv", "attention", "out", "mlp", "head", "all_reduce")

RopeTables = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines, [positions, head_dim / 2]."""

_VECTORS = ("input_norm", "post_norm", "q_norm", "k_norm", "qkv_bias", "out_bias")
_MATRICES = ("qkv", "out", "gate_up", "down")


class _Layer(ctypes.Structure):
    _fields_ = [(name, c_void_p) for name in (*_VECTORS, *_MATRICES, "keys", "values")]


class _Model(ctypes.Structure):
    _fields_ = [
        *((name, c_int64) for name in ("layers", "hidden", "intermediate", "query_heads", "kv_heads", "head_dim")),
        *((name, c_int64) for name in ("block_size", "vocabulary", "first_token")),
        ("norm_eps", c_double),
        ("layer", POINTER(_Layer)),
        *((name, c_void_p) for name in ("embedding", "head", "norm", "cosines", "sines", "nanoseconds", "workspace")),
        ("threads", c_int64),
        *((name, c_void_p) for name in ("all_reduce", "exchange")),
    ]


class _Step(ctypes.Structure):
    _fields_ = [
        *((name, c_int64) for name in ("tokens", "chunks", "width", "drawn")),
        *((name, c_void_p) for name in ("token_ids", "positions", "starts", "lengths", "tables", "drawn_rows")),
        *((name, c_void_p) for name in ("residual", "partial", "logits")),
    ]


def unsupported(architecture: Architecture, *, block_size: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """The reason why `CpuDecoder` cannot compute this here, or None where it can. Compiles the kernels.

    `architecture` is the rank's own.
    """
    a = architecture
    if device.type != "cpu":
        return f"the C++ decoder is for CPUs, not {device.type}"
    if dtype not in (torch.bfloat16, torch.float32):
        return f"the C++ decoder computes in bfloat16 or float32, not {str(dtype).removeprefix('torch.')}"
    sizes = {"block_size": block_size, "head_dim": a.head_dim, "hidden_size": a.hidden_size}
    sizes |= {"intermediate_size": a.intermediate_size, "vocab_size": a.vocab_size}
    for name, size in sizes.items():
        if size % LANES:
            return f"the C++ decoder needs a {name} that is a multiple of {LANES}, not {size}"
    if a.head_dim > MOST_HEAD_DIM:
        return f"the C++ decoder computes heads of up to {MOST_HEAD_DIM}, not {a.head_dim}"
    try:
        _library(dtype)
        load_kernel()
    except KernelUnavailable as error:
        return str(error)
    return None


def _library(dtype: torch.dtype) -> ctypes.CDLL:
    library = load("decoder", needs=VECTORS, define="IN_FP32" if dtype == torch.float32 else None)
    library.decoder_workspace_bytes.restype = c_int64
    library.decoder_run.argtypes = [POINTER(_Model), POINTER(_Step), c_int64, c_int64]
    library.decoder_run.restype = c_int
    library.decoder_pack.argtypes = [c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int64]
    library.decoder_pack.restype = None
    return library


class CpuDecoder(Decoder):
    """See `Decoder`. Uses as many threads as torch does when it is made."""

    def __init__(self, architecture: Architecture, *, cache: KVCache, rope: RopeTables, collective: Collective) -> None:
        """Make a decoder. `architecture` is this rank's own, for which `unsupported` must be None.

        Args:
            rope: The tables of `rope_tables`.

        Raises:
            KernelUnavailable: the kernels are not available.
        """
        self._dtype = cache.data.dtype
        self._library = _library(self._dtype)
        in_cpp = collective.size == 1 or collective.native is not None
        drawing = CpuDrawing(collective) if in_cpp else TorchDrawing(collective)
        super().__init__(Packing(architecture, Packed(self._dtype)), cache, drawing)
        self._architecture = a = architecture
        self._collective = collective
        self._layers = (_Layer * a.layers)()
        for index, layer in enumerate(self._layers):
            layer.keys, layer.values = (cache.data[index, part].data_ptr() for part in (0, 1))
        self._nanoseconds = np.zeros(len(SECTIONS), np.int64)
        self._all_reduce_s = 0.0
        self._rope = rope
        cosines, sines = rope
        self._model = _Model(
            layers=a.layers,
            hidden=a.hidden_size,
            intermediate=a.intermediate_size,
            query_heads=a.query_heads,
            kv_heads=a.kv_heads,
            head_dim=a.head_dim,
            block_size=cache.block_size,
            vocabulary=a.vocab_size,
            first_token=collective.rank * a.vocab_size,
            norm_eps=a.norm_eps,
            layer=self._layers,
            cosines=cosines.data_ptr(),
            sines=sines.data_ptr(),
            nanoseconds=self._nanoseconds.ctypes.data,
            threads=torch.get_num_threads(),
        )
        if (native := collective.native) is not None:
            self._model.all_reduce, self._model.exchange = native.sum, native.exchange
        self._workspace = torch.empty(0, dtype=torch.uint8)
        self._residual, self._partial = torch.empty(0, dtype=self._dtype), torch.empty(0)
        self._logits = torch.empty(0)

    def reshaped(self, architecture: Architecture, collective: Collective) -> "CpuDecoder":
        """See `Decoder`."""
        cache = self.cache.reshaped(architecture)
        return CpuDecoder(architecture, cache=cache, rope=self._rope, collective=collective)

    def _use(self, group: Group, fused: Mapping[str, torch.Tensor]) -> None:
        """See `Decoder`."""
        to: ctypes.Structure = self._model if isinstance(group, str) else self._layers[group]
        for name, tensor in fused.items():
            setattr(to, name, tensor.data_ptr())
        if group == "embedding" and self._architecture.tied:
            self._model.head = self._model.embedding

    def _forget(self, group: Group) -> None:
        """See `Decoder`. There is nothing to drop: this decoder has addresses only."""

    def forward(self, batch: Batch) -> torch.Tensor:
        """See `Decoder`. The logits are overwritten by the next call."""
        assert self.is_loaded, "a decoder has to be loaded first"
        assert batch.tables_CN.max(initial=0) < self.cache.blocks, "a block is beyond the cache"
        assert batch.positions_T.max(initial=0) < len(self._rope[0]), "a position is beyond max_model_len"
        tokens, drawn = len(batch.tokens_T), len(batch.drawn_N)
        partial_TH = self._reserve(tokens, drawn)
        step = self._step(batch)
        stages = 2 * self._architecture.layers + 2
        if self._collective.size == 1 or self._model.all_reduce:
            self._collective.check(self._library.decoder_run(byref(self._model), byref(step), 0, stages))
        else:
            for stage in range(stages):
                self._library.decoder_run(byref(self._model), byref(step), stage, stage + 1)
                if stage + 1 < stages:
                    self._all_reduce(partial_TH)
        return self._logits[: drawn * self._architecture.vocab_size].view(drawn, self._architecture.vocab_size)

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """See `Decoder`."""
        self.cache.copy(pairs)

    def take_seconds(self) -> dict[str, float]:
        """See `Decoder`."""
        seconds = dict(zip(SECTIONS, (self._nanoseconds * 1e-9).tolist(), strict=True))
        seconds["all_reduce"] += self._all_reduce_s
        self._nanoseconds[:] = 0
        self._all_reduce_s = 0.0
        return seconds

    def _all_reduce(self, partial_TH: torch.Tensor) -> None:
        started = time.perf_counter()
        self._collective.all_reduce(partial_TH)
        self._all_reduce_s += time.perf_counter() - started

    def _reserve(self, tokens: int, drawn: int) -> torch.Tensor:
        """Make the buffers large enough, with room to grow. Return the sums to exchange, [tokens, H]."""
        if not len(self._workspace):
            self._workspace = torch.empty(self._library.decoder_workspace_bytes(byref(self._model)), dtype=torch.uint8)
            self._model.workspace = self._workspace.data_ptr()
        size, logits = tokens * self._architecture.hidden_size, drawn * self._architecture.vocab_size
        if len(self._partial) < size:
            room = max(size, 2 * len(self._partial))
            self._residual, self._partial = torch.empty(room, dtype=self._dtype), torch.empty(room)
        if len(self._logits) < logits:
            self._logits = torch.empty(max(logits, 2 * len(self._logits)))
        return self._partial[:size].view(tokens, -1)

    def _step(self, batch: Batch) -> _Step:
        """Make the step for C++. It points into the batch, which has to outlive it."""
        return _Step(
            tokens=len(batch.tokens_T),
            chunks=len(batch.lengths_C),
            width=batch.tables_CN.shape[1],
            drawn=len(batch.drawn_N),
            token_ids=_address(batch.tokens_T),
            positions=_address(batch.positions_T),
            starts=_address(batch.starts_C),
            lengths=_address(batch.lengths_C),
            tables=_address(batch.tables_CN),
            drawn_rows=_address(batch.drawn_N),
            residual=self._residual.data_ptr(),
            partial=self._partial.data_ptr(),
            logits=self._logits.data_ptr(),
        )


class Packed(Format):
    """Numbers that a vector instruction multiplies are neighbours: [N / 16, K / 2, 16, 2], in fp32 [N / 16, K, 16, 1].

    Gate and up alternate by 16 rows.
    """

    vectors = torch.float32

    def __init__(self, dtype: torch.dtype) -> None:
        """`dtype`: of the matrices, bf16 or fp32."""
        self.matrices = dtype
        self._per_word = torch.float32.itemsize // dtype.itemsize

    def shape(self, rows: int, columns: int) -> tuple[int, ...]:
        """See `Format`."""
        return rows // LANES, columns // self._per_word, LANES, self._per_word

    def write(self, weight_NK: torch.Tensor, matrix: torch.Tensor) -> None:
        """See `Format`."""
        groups, words, *_ = matrix.shape
        assert weight_NK.shape == (LANES * groups, self._per_word * words), "the kernel trusts these sizes"
        weight_NK = weight_NK.to(matrix.device, self.matrices).contiguous()  # the kernel reads this memory
        stride = matrix.stride(0) // self._per_word
        threads = torch.get_num_threads()
        library = _library(self.matrices)
        library.decoder_pack(weight_NK.data_ptr(), matrix.data_ptr(), groups, words, stride, threads)

    def gate_and_up(self, fused: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Format`."""
        gate, up = fused.view(-1, 2, *fused.shape[1:]).unbind(1)
        return gate, up


def rope_tables(architecture: Architecture, positions: int) -> RopeTables:
    """Make cosines and sines, [positions, head_dim / 2]."""
    frequencies = inverse_frequencies(architecture.rope, architecture.head_dim)
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies)
    return angles.cos(), angles.sin()


def _address(array: npt.NDArray[np.int64]) -> int:
    return array.ctypes.data
