"""The decoder in C++ (`kernels/decoder.cpp`), for bf16 on CPUs with AVX512-BF16.

Python packs the weights and makes one call a step, or two a layer where C++ cannot call the ranks' exchange. Sums are
taken in the same order whatever the batch: a token's logits are the same bit for bit alone, in a batch, in a chunk of a
prompt of any size, and over prompt blocks that others filled.
"""

import ctypes
import time
from collections.abc import Mapping
from ctypes import POINTER, byref, c_double, c_int, c_int64, c_void_p

import numpy as np
import numpy.typing as npt
import torch

from tailrace.engine.architecture import Architecture
from tailrace.engine.collectives.base import Collective
from tailrace.engine.decoder.base import Batch, Decoder
from tailrace.engine.drawing import TorchDrawing
from tailrace.engine.kernels.build import AVX512_BF16, KernelUnavailable, load
from tailrace.engine.kernels.sampling import CpuDrawing, load_kernel
from tailrace.engine.kv_cache import KVCache

LANES = 16
MOST_HEAD_DIM = 256
SECTIONS = ("embed", "qkv", "attention", "out", "mlp", "head", "all_reduce")

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
    """Why `CpuDecoder` cannot compute this here, or None where it can. Compiles the kernels.

    architecture: the rank's own.
    """
    a = architecture
    if device.type != "cpu" or dtype != torch.bfloat16:
        return f"the C++ decoder is for bfloat16 on CPUs, not {str(dtype).removeprefix('torch.')} on {device.type}"
    sizes = {"block_size": block_size, "head_dim": a.head_dim, "hidden_size": a.hidden_size}
    sizes |= {"intermediate_size": a.intermediate_size, "vocab_size": a.vocab_size}
    for name, size in sizes.items():
        if size % LANES:
            return f"the C++ decoder needs a {name} that is a multiple of {LANES}, not {size}"
    if a.head_dim > MOST_HEAD_DIM:
        return f"the C++ decoder computes heads of up to {MOST_HEAD_DIM}, not {a.head_dim}"
    try:
        _library()
        load_kernel()
    except KernelUnavailable as error:
        return str(error)
    return None


def _library() -> ctypes.CDLL:
    library = load("decoder", needs=AVX512_BF16)
    library.decoder_workspace_bytes.restype = c_int64
    library.decoder_run.argtypes = [POINTER(_Model), POINTER(_Step), c_int64, c_int64]
    library.decoder_run.restype = c_int
    return library


class CpuDecoder(Decoder):
    """See `Decoder`. Uses as many threads as torch does when it is made."""

    def __init__(
        self,
        architecture: Architecture,
        *,
        blocks: int,
        block_size: int,
        max_model_len: int,
        collective: Collective,
    ) -> None:
        """`architecture`: this rank's own, for which `unsupported` is None.

        Raises:
            KernelUnavailable: the kernels cannot be had.
            ConfigError: there is no room for the cache.
        """
        self._library = _library()
        in_cpp = collective.size == 1 or collective.native is not None
        self.drawing = CpuDrawing(collective) if in_cpp else TorchDrawing(collective)
        self._architecture = a = architecture
        self._collective = collective
        cpu = torch.device("cpu")
        self._cache = KVCache(a, blocks=blocks, block_size=block_size, dtype=torch.bfloat16, device=cpu)
        self._layers = (_Layer * a.layers)()
        for index, layer in enumerate(self._layers):
            layer.keys, layer.values = (self._cache.data[index, part].data_ptr() for part in (0, 1))
        self._nanoseconds = np.zeros(len(SECTIONS), np.int64)
        self._all_reduce_s = 0.0
        self._cosines, self._sines = _rope_tables(a, max_model_len)
        self._model = _Model(
            layers=a.layers,
            hidden=a.hidden_size,
            intermediate=a.intermediate_size,
            query_heads=a.query_heads,
            kv_heads=a.kv_heads,
            head_dim=a.head_dim,
            block_size=block_size,
            vocabulary=a.vocab_size,
            first_token=collective.rank * a.vocab_size,
            norm_eps=a.norm_eps,
            layer=self._layers,
            cosines=self._cosines.data_ptr(),
            sines=self._sines.data_ptr(),
            nanoseconds=self._nanoseconds.ctypes.data,
            threads=torch.get_num_threads(),
        )
        if (native := collective.native) is not None:
            self._model.all_reduce, self._model.exchange = native.sum, native.exchange
        self._workspace = torch.empty(self._library.decoder_workspace_bytes(byref(self._model)), dtype=torch.uint8)
        self._model.workspace = self._workspace.data_ptr()
        self._residual, self._partial = torch.empty(0, dtype=torch.bfloat16), torch.empty(0)
        self._logits = torch.empty(0)
        self._ends: list[torch.Tensor] = []
        self._layer_weights: dict[int, dict[str, torch.Tensor]] = {}

    def load(self, named: Mapping[str, torch.Tensor]) -> None:
        """See `Decoder`."""
        embedding = pack(named["model.embed_tokens.weight"])
        head = embedding if self._architecture.tied else pack(named["lm_head.weight"])
        norm = _vector(named["model.norm.weight"])
        self._model.embedding, self._model.head, self._model.norm = (t.data_ptr() for t in (embedding, head, norm))
        self._ends = [embedding, head, norm]
        for index, layer in enumerate(self._layers):
            weights = _layer_weights(self._architecture, f"model.layers.{index}.", named)
            for name, tensor in weights.items():
                setattr(layer, name, tensor.data_ptr())
            self._layer_weights[index] = weights

    def forward(self, batch: Batch) -> torch.Tensor:
        """See `Decoder`. The logits are overwritten by the next call."""
        assert self._ends, "a decoder has to be loaded first"
        assert batch.tables_CN.max(initial=0) < self._cache.blocks, "a block is beyond the cache"
        assert batch.positions_T.max(initial=0) < len(self._cosines), "a position is beyond max_model_len"
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
        self._cache.copy(pairs)

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
        """Make the buffers large enough, with room to grow. Returns [tokens, H], the sums to exchange."""
        size, logits = tokens * self._architecture.hidden_size, drawn * self._architecture.vocab_size
        if len(self._partial) < size:
            room = max(size, 2 * len(self._partial))
            self._residual, self._partial = torch.empty(room, dtype=torch.bfloat16), torch.empty(room)
        if len(self._logits) < logits:
            self._logits = torch.empty(max(logits, 2 * len(self._logits)))
        return self._partial[:size].view(tokens, -1)

    def _step(self, batch: Batch) -> _Step:
        """It points into the batch, which has to outlive it."""
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


def pack(weight_NK: torch.Tensor) -> torch.Tensor:
    """[N / 16, K / 2, 16, 2] bf16: what a vector instruction multiplies lies together."""
    rows, columns = weight_NK.shape
    pairs = weight_NK.to(torch.bfloat16).contiguous().view(torch.int32)
    packed = pairs.view(rows // LANES, LANES, columns // 2).transpose(1, 2).contiguous()
    return packed.view(torch.bfloat16).view(rows // LANES, columns // 2, LANES, 2)


def _vector(weight: torch.Tensor) -> torch.Tensor:
    """A copy of it in fp32."""
    return weight.to(torch.float32, memory_format=torch.contiguous_format, copy=True)


def _layer_weights(a: Architecture, prefix: str, named: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """By the names of `_Layer`."""
    attention = f"{prefix}self_attn."
    gate, up = (named[f"{prefix}mlp.{part}_proj.weight"].reshape(-1, LANES, a.hidden_size) for part in ("gate", "up"))
    weights = {
        "input_norm": _vector(named[f"{prefix}input_layernorm.weight"]),
        "post_norm": _vector(named[f"{prefix}post_attention_layernorm.weight"]),
        "qkv": pack(torch.cat([named[f"{attention}{part}_proj.weight"] for part in "qkv"])),
        "out": pack(named[f"{attention}o_proj.weight"]),
        "gate_up": pack(torch.stack((gate, up), dim=1).flatten(0, 2)),
        "down": pack(named[f"{prefix}mlp.down_proj.weight"]),
    }
    if a.qkv_bias:
        weights["qkv_bias"] = _vector(torch.cat([named[f"{attention}{part}_proj.bias"] for part in "qkv"]))
    if a.out_bias:
        weights["out_bias"] = _vector(named[f"{attention}o_proj.bias"])
    if a.qk_norm:
        weights |= {f"{part}_norm": _vector(named[f"{attention}{part}_norm.weight"]) for part in "qk"}
    return weights


def _rope_tables(architecture: Architecture, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines, [positions, head_dim / 2]."""
    frequencies = architecture.rope.inverse_frequencies(architecture.head_dim)
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies)
    return angles.cos(), angles.sin()


def _address(array: npt.NDArray[np.int64]) -> int:
    return array.ctypes.data
