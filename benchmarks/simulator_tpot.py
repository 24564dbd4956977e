"""Time per output token (TPOT) of serving dense models: published measurements against our step times.

    python benchmarks/simulator_tpot.py

aiconfigurator-core (the extra `plan`) holds measurements of vLLM and TensorRT-LLM on H100, H200 and A100, beside its
kernel tables. Each has a constant number of requests in flight. A row's half is told by a hash of its id. What the host
takes of a step, besides the kernels, is fitted on one half for each backend; the errors are those of the other half.
"""

import csv
import hashlib
import json
import re
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import compress
from pathlib import Path
from typing import Any, Literal

import numpy as np
from scipy.optimize import minimize

from tailrace.config.hardware import DType
from tailrace.errors import PlanError, one_line
from tailrace.planning.hardware.base import Pool
from tailrace.planning.hardware.clusters import open_cluster
from tailrace.planning.model_shape.base import ModelShape
from tailrace.planning.model_shape.catalogue import find_shape
from tailrace.planning.step_times.basis import Source
from tailrace.planning.step_times.generation import ELEMENT_BYTES, AnalyticStepTimes
from tailrace.planning.step_times.kernels import Backend, KernelStepTimes, package
from tailrace.planning.step_times.operators import Pass, prefill
from tailrace.planning.step_times.rates import Host

DEVICES = {"h100_sxm": "H100", "h200_sxm": "H200", "a100_sxm": "A100"}
BACKENDS = ("vllm", "trtllm")
PRECISIONS: Mapping[str, DType] = {"": "bfloat16", "bf16": "bfloat16", "fp8": "float8"}
MODELS = re.compile(r".*/((Llama-3\.1-(8|70)B|Qwen3-32B).*)")
"""The dense models of the measurements."""
BUDGET = 8192
"""Tokens of a step: what both backends have by default on these devices."""
USED = 0.9
"""The part of the memory that both backends use by default."""
Kind = Literal["kernels", "analytic"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A measurement."""

    id: str
    backend: Backend
    model: str
    device: str
    dtype: DType
    prompt: int
    """Tokens."""
    response: int
    """Tokens."""
    requests: int
    """Requests in flight, of the one engine."""
    tp: int
    tpot_s: float

    @property
    def held_out(self) -> bool:
        """Whether nothing may be fitted on it."""
        return hashlib.sha256(self.id.encode()).digest()[0] % 2 == 1


def read_rows(file: Path) -> list[Row]:
    """Return the measurements of dense models by whole engines."""
    with file.open(encoding="utf-8") as lines:
        return [row for fields in csv.DictReader(lines) if (row := _row(fields)) is not None]


def _row(fields: Mapping[str, str]) -> Row | None:
    model = MODELS.fullmatch(fields["model_path"])
    known = fields["system"] in DEVICES and fields["backend"] in BACKENDS and fields["precision"] in PRECISIONS
    if model is None or not known or fields["mode"] != "agg" or int(fields["pp_size"]) != 1:
        return None
    return Row(
        id=fields["id"],
        backend=fields["backend"],  # type: ignore[arg-type]
        model=model[1].removesuffix("-FP8"),
        device=DEVICES[fields["system"]],
        dtype=PRECISIONS[fields["precision"]],
        prompt=int(fields["isl"]),
        response=int(fields["osl"]),
        requests=int(fields["batch_size"]),
        tp=int(fields["tp_size"]),
        tpot_s=float(fields["silicon_tpot_ms"]) / 1e3,
    )


@dataclass(frozen=True, slots=True)
class Steady:
    """An engine in the steady state: per output token, it does one decode step, and parts of prompts."""

    kernels_s: float
    """Seconds of TPOT by the step times alone."""
    tokens: float
    """Sequences that get a token in a step, on average."""

    def tpot_s(self, host: Host) -> float:
        """TPOT, with what the host takes of each step."""
        return self.kernels_s + host.seconds(self.tokens)


def steady(times: Source, row: Row, cache_tokens: float) -> Steady:
    """Return the steady state of an engine with so many requests in flight, one starting as another ends.

    A request waits for its prompt, and then decodes. Meanwhile each of the others has its prompt computed once, less
    what falls into the time that the request itself waits.
    """
    most = cache_tokens / (row.prompt + row.response / 2)
    running = min(float(row.requests), most)
    context = running * (row.prompt + row.response / 2)
    step = times.step_s(row.tp, running, context, 1)
    added = sum(times.mixed_s(row.tp, running, context, chunk) - step for chunk in _chunks(row.prompt))
    steps, waiting = row.response - 1, step + added
    decoding = steps * step + (running - 1) * added
    for _ in range(20):
        decoding = steps * step + (running - 1) * added * decoding / (decoding + waiting)
    prompts = (running - 1) * decoding / (decoding + waiting) / steps
    return Steady(decoding / steps, running + prompts)


def _chunks(prompt: int) -> Iterator[Pass]:
    for start in range(0, prompt, BUDGET):
        length = min(BUDGET, prompt - start)
        yield prefill(1, length, cached=start, logits=float(start + length == prompt))


def cache_tokens(row: Row, shape: ModelShape, pool: Pool) -> float:
    """Return the tokens whose keys and values fit beside the weights."""
    bytes_each = ELEMENT_BYTES[row.dtype]
    weights = shape.parameters * bytes_each / row.tp
    return (pool.device.memory_bytes * USED - weights) / shape.cache_bytes(tp=row.tp, element_bytes=bytes_each)


@cache
def source(kind: Kind, backend: Backend, model: str, device: str, dtype: DType) -> Source:
    """Return step times of a model on a device."""
    shape = find_shape(model)
    if kind == "kernels":
        return KernelStepTimes(shape, device, backend=backend, dtype=dtype, cache_dtype=dtype)
    return AnalyticStepTimes(shape, open_cluster(f"8x{device}").pools[0], dtype=dtype, cache_dtype=dtype)


def states(kind: Kind, rows: Sequence[Row]) -> list[Steady]:
    """Return the steady state of each row."""
    found = []
    for row in rows:
        tokens = cache_tokens(row, find_shape(row.model), open_cluster(f"8x{row.device}").pools[0])
        found.append(steady(source(kind, row.backend, row.model, row.device, row.dtype), row, tokens))
    return found


def fitted_host(rows: Sequence[Row], found: Sequence[Steady]) -> Host:
    """Return what the host takes of a step, with the least mean relative error."""
    measured = np.array([row.tpot_s for row in rows])
    kernels = np.array([state.kernels_s for state in found])
    tokens = np.array([state.tokens for state in found])

    def error(host: Sequence[float]) -> float:
        return float(np.abs((kernels + 1e-3 * host[0] + 1e-6 * host[1] * tokens) / measured - 1).mean())

    best = minimize(error, [1.0, 10.0], method="Nelder-Mead", bounds=[(0, None), (0, None)])
    return Host(step_s=1e-3 * float(best.x[0]), sequence_s=1e-6 * float(best.x[1]))


def tpot_errors() -> dict[str, Any]:
    """Return the errors of TPOT on the rows that nothing was fitted on, and what was fitted on the others.

    Raises:
        PlanError: aiconfigurator-core is not installed.
    """
    rows = read_rows(package() / "systems" / "silicon_sample.csv")
    kernels, analytic = states("kernels", rows), states("analytic", rows)
    hosts = {backend: _host(backend, rows, kernels) for backend in BACKENDS}
    held_out = [row.held_out for row in rows]
    errors = {
        name: [abs(state.tpot_s(hosts[row.backend]) / row.tpot_s - 1) for row, state in zip(rows, found, strict=True)]
        for name, found in (("", kernels), ("_analytic", analytic))
    }
    result: dict[str, Any] = {"tpot_rows": sum(held_out)}
    for name, each in errors.items():
        tested = list(compress(each, held_out))
        result[f"tpot{name}_median_error_pct"] = round(100 * statistics.median(tested), 1)
        result[f"tpot{name}_p90_error_pct"] = round(100 * float(np.quantile(tested, 0.9)), 1)
    return result | {
        "tpot_median_error_pct_of": _by_model(rows, errors[""]),
        "tpot_host": {name: [round(1e3 * h.step_s, 2), round(1e6 * h.sequence_s, 1)] for name, h in hosts.items()},
    }


def _host(backend: str, rows: Sequence[Row], found: Sequence[Steady]) -> Host:
    chosen = [(row, state) for row, state in zip(rows, found, strict=True) if row.backend == backend]
    fit = [(row, state) for row, state in chosen if not row.held_out]
    return fitted_host([row for row, _ in fit], [state for _, state in fit])


def _by_model(rows: Sequence[Row], errors: Sequence[float]) -> dict[str, float]:
    groups = defaultdict(list)
    for row, error in zip(rows, errors, strict=True):
        if row.held_out:
            groups[f"{row.backend} {row.model} {row.dtype} {row.device}"].append(error)
    return {name: round(100 * statistics.median(each), 1) for name, each in sorted(groups.items())}


def main() -> None:
    """Compare; the last line is one of JSON."""
    try:
        result = tpot_errors()
    except PlanError as error:
        result = {"skipped": one_line(error)}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
