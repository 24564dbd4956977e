"""An engine's steps, added up over kernels that were measured: the tables of NVIDIA's aiconfigurator-core.

The package (Apache-2.0) is an extra: pip install "tailrace[plan]". It takes 10 to 200 microseconds for a step. So parts
of steps are put into a grid once for each TP degree, which takes a second the first time, and are interpolated.
"""

import json
import logging
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

from tailrace.config.hardware import DType
from tailrace.errors import PlanError, one_line
from tailrace.planning.curves import Curve, Surface
from tailrace.planning.model_shape.base import ModelShape
from tailrace.planning.step_times.basis import Basis
from tailrace.planning.step_times.operators import NOTHING, Pass, decode, prefill
from tailrace.planning.step_times.rates import NO_HOST, Host, rows_of_decoding

Backend = Literal["vllm", "trtllm", "sglang"]

SYSTEMS = {
    "H100": "h100_sxm",
    "H200": "h200_sxm",
    "A100": "a100_sxm",
    "B200": "b200_sxm",
    "GB200": "gb200",
    "L40S": "l40s",
    "RTX-PRO-6000": "rtx_pro_6000_server",
}
"""The package's name of each kind of device that it has tables of."""

BASIS = Basis(kind="kernels", error=0.16)
"""Of nine of ten published measurements of serving that nothing was fitted on, see `benchmarks/simulator_tpot.py`."""

_QUANTISED: Mapping[DType, str] = {"bfloat16": "bfloat16", "float8": "fp8"}
_PRODUCTS: Mapping[DType, str] = {"bfloat16": "bfloat16", "float8": "fp8_static"}
"""With scales of activations that were found before, as checkpoints for serving have them."""
_EXPERTS: Mapping[DType, str] = {"bfloat16": "bfloat16", "float8": "fp8_block"}
"""With a scale for each block of weights, as published mixtures of experts have them."""
_SIZES = tuple(2**exponent for exponent in range(11))
_CONTEXTS = (1, 128, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
"""Cached tokens of each sequence that decodes."""
_TOKENS = tuple(2**exponent for exponent in range(17))
"""Tokens of a pass."""
_TILED = tuple(sorted({*_TOKENS, *(256 * tiles + extra for tiles in range(1, 17) for extra in (0, 1))}))
"""Those, and what fills tiles of products, and one more than that: the package measured both, and there are steps."""
_SHORTEST = 16
"""Tokens of the shortest prompt."""
_CACHED = (0, 1024, 4096, 16384, 65536)
"""Tokens that were cached before a chunk."""


class KernelStepTimes:
    """The steps of engines of one kind of device, by the kernels of one backend. A degree is tabulated when it is asked
    for first."""

    basis = BASIS

    def __init__(
        self,
        shape: ModelShape,
        kind: str,
        *,
        backend: Backend = "vllm",
        dtype: DType = "bfloat16",
        cache_dtype: DType = "bfloat16",
        host: Host = NO_HOST,
    ) -> None:
        """`kind`: of the devices. `dtype`, `cache_dtype`: of the weights, and of keys and values.

        Raises:
            PlanError: the package is not installed, or it has no tables of such devices, types or layers.
        """
        if kind not in SYSTEMS:
            raise PlanError(f"there are no kernel tables of {kind}; there are of {', '.join(SYSTEMS)}")
        for found in (dtype, cache_dtype):
            if found not in _QUANTISED:
                raise PlanError(f"there are no kernel tables of {found}; there are of {', '.join(_QUANTISED)}")
        self._engine = _engine()
        self._config = json.dumps(config_of(shape))
        self._shape = shape
        self._system = SYSTEMS[kind]
        self._rows = rows_of_decoding(kind)
        self._backend = backend
        self._dtype: DType = dtype
        self._cache_dtype: DType = cache_dtype
        self._host = host
        self._tables: dict[int, _Tables] = {}

    def step_s(
        self, tp: int, batch_size: float, context_tokens: float, replicas: int, others: float | None = None
    ) -> float:
        """Seconds of a decode step; see `StepTimes`. Replicas do not disturb each other."""
        return self._pass_s(tp, decode(batch_size, context_tokens), NOTHING)

    def prefill_s(self, tp: int, batch_size: float, rms_length: float) -> float:
        """Seconds of a prefill; see `StepTimes`."""
        return self._pass_s(tp, NOTHING, prefill(batch_size, rms_length))

    def mixed_s(self, tp: int, batch_size: float, context_tokens: float, chunk: Pass) -> float:
        """Seconds of a step that decodes, and computes a part of prompts in the same pass."""
        return self._pass_s(tp, decode(batch_size, context_tokens), chunk)

    def _pass_s(self, tp: int, decoded: Pass, chunk: Pass) -> float:
        tables, tokens = self._of(tp), decoded.tokens + chunk.tokens
        if tokens <= 0:
            return 0.0
        logits = decoded.logits + chunk.logits
        seconds = tables.body.at(tokens)
        if logits:
            seconds += tables.head.at(logits)
        if decoded.tokens:
            seconds += self._decoded_s(tables, decoded, beside=bool(chunk.tokens))
        if chunk.tokens:
            seconds += tables.prefilled.at(chunk.tokens, chunk.pairs)
        return self._host.step(seconds, logits)

    def _decoded_s(self, tables: "_Tables", decoded: Pass, *, beside: bool) -> float:
        """Attention of what decodes, by itself or beside prompts."""
        seconds = tables.decoded.at(decoded.tokens, decoded.pairs)
        if not beside or self._rows == 1:
            return seconds
        return max(seconds, tables.prefilled.at(self._rows * decoded.tokens, self._rows * decoded.pairs))

    def has(self, tp: int) -> bool:
        """Whether there are tables of the model under a TP degree."""
        try:
            self._of(tp)
        except PlanError:
            return False
        return True

    def _of(self, tp: int) -> "_Tables":
        if tp in self._tables:
            return self._tables[tp]
        if self._shape.heads % tp:
            raise PlanError(f"{self._shape.name} has {self._shape.heads} heads, which TP {tp} does not divide")
        try:
            self._tables[tp] = _tables(self._compiled(tp))
        except (ValueError, RuntimeError, KeyError) as error:  # what the package raises where it lacks something
            raise PlanError(
                f"the kernel tables of {self._system}, {self._backend} do not have {self._shape.name} with TP {tp} in "
                f"{self._dtype}: {one_line(error)}"
            ) from None
        return self._tables[tp]

    def _compiled(self, tp: int) -> Any:
        experts = {"moe_tp_size": 1, "moe_ep_size": tp} if self._shape.experts else {}
        with tempfile.TemporaryDirectory() as directory:  # a new one each time: the package caches by the path
            (Path(directory) / "config.json").write_text(self._config, encoding="utf-8")
            return self._engine.EngineHandle.compile(
                directory,
                self._system,
                self._backend,
                tp_size=tp,
                gemm_quant_mode=_PRODUCTS[self._dtype],
                moe_quant_mode=_EXPERTS[self._dtype],
                kvcache_quant_mode=_QUANTISED[self._cache_dtype],
                fmha_quant_mode=_QUANTISED["bfloat16" if self._backend == "vllm" else self._cache_dtype],
                **experts,
            )


@dataclass(frozen=True, slots=True)
class _Tables:
    """Seconds of the parts of a pass."""

    body: Curve
    """All but attention and the head, by tokens."""
    head: Curve
    """By tokens whose logits are computed."""
    decoded: Surface
    """Attention of tokens that decode, by these and by pairs."""
    prefilled: Surface
    """Attention of chunks, by their tokens and by pairs."""


@dataclass(frozen=True, slots=True)
class _Parts:
    """Seconds of the parts of a pass."""

    attention: float
    head: float
    body: float


def _tables(handle: Any) -> _Tables:
    return _Tables(
        body=_rising((tokens, _chunk(handle, 1, tokens, 0).body) for tokens in _TILED),
        head=_rising((size, _step(handle, size, 1).head) for size in _SIZES),
        decoded=Surface.through({size: _rising_points(_decoded(handle, size)) for size in _SIZES}),
        prefilled=Surface.through({tokens: _rising_points(_prefilled(handle, tokens)) for tokens in _TOKENS}),
    )


def _decoded(handle: Any, size: int) -> Iterator[tuple[float, float]]:
    for context in _CONTEXTS:
        yield size * context, _step(handle, size, context).attention


def _prefilled(handle: Any, tokens: int) -> Iterator[tuple[float, float]]:
    """One sequence with more and more cached tokens, and more and more sequences."""
    for cached in _CACHED:
        yield prefill(1, tokens, cached=cached).pairs, _chunk(handle, 1, tokens, cached).attention
    for sequences in (4, 16, 64):
        if tokens >= _SHORTEST * sequences:
            length = tokens // sequences
            yield prefill(sequences, length).pairs, _chunk(handle, sequences, length, 0).attention


def _step(handle: Any, size: int, context: int) -> _Parts:
    return _parts(handle.run_static_per_op(batch_size=size, isl=context, osl=2, mode="static_gen")[1])


def _chunk(handle: Any, sequences: int, tokens: int, cached: int) -> _Parts:
    # the length of the prompt counts what was cached of it
    length = tokens + cached
    return _parts(
        handle.run_static_per_op(batch_size=sequences, isl=length, osl=1, prefix=cached, mode="static_ctx")[0]
    )


def _parts(operators: Iterable[tuple[str, float, float, str]]) -> _Parts:
    """The parts of a pass, of whose operators the names and milliseconds are given, and more."""
    seconds = {name: each / 1e3 for name, each, *_ in operators}
    attention = sum(each for name, each in seconds.items() if name.endswith("attention"))
    head = sum(each for name, each in seconds.items() if name.endswith("logits_gemm"))
    return _Parts(attention=attention, head=head, body=sum(seconds.values()) - attention - head)


def _rising(points: Iterable[tuple[float, float]]) -> Curve:
    return Curve.through(_rising_points(points))


def _rising_points(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points with what was measured as less than for less work raised to that."""
    ordered = sorted(dict(points).items())
    return list(zip([x for x, _ in ordered], accumulate((y for _, y in ordered), max), strict=True))


def package() -> Path:
    """The directory of aiconfigurator-core.

    Raises:
        PlanError: it is not installed.
    """
    return Path(_engine().__file__).parents[1]


def _engine() -> Any:
    try:
        from aiconfigurator_core.sdk import engine
    except ImportError as error:
        raise PlanError(
            f'step times from measured kernels need aiconfigurator-core ({error}); pip install "tailrace[plan]"'
        ) from None
    # it warns of tables that hardly any model needs
    logging.getLogger("aiconfigurator_core").setLevel(logging.ERROR)
    return engine


def config_of(shape: ModelShape) -> dict[str, Any]:
    """The fields of a config.json from which the package reads a model of these sizes."""
    fields: dict[str, Any] = {
        "architectures": [_architecture(shape)],
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.context,
        "torch_dtype": "bfloat16",
    }
    if (experts := shape.experts) is not None:
        fields |= {
            "num_experts": experts.count,
            "num_experts_per_tok": experts.per_token,
            "moe_intermediate_size": experts.intermediate,
        }
    return fields


def _architecture(shape: ModelShape) -> str:
    if shape.latent is not None:
        raise PlanError(f"{shape.name} has latent attention, which its kernel tables are not read for")
    if shape.experts is not None:
        return "Qwen3MoeForCausalLM"
    return "Qwen3ForCausalLM" if shape.qk_norm else "LlamaForCausalLM"
