"""Fits the rates of analytic step times to the kernel tables of H100, and compares with those of other devices.

    python benchmarks/rates_fit.py

needs the extra `plan`. It prints the rates (`planning/step_times/rates.py` has them), and ends with one JSON line: the
errors of dense models and of mixtures of experts on each device, in percent, as the median and what nine of ten steps
are within.
"""

import json
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial

import numpy as np
from scipy.optimize import minimize

from tailrace.planning.hardware.base import Pool
from tailrace.planning.hardware.clusters import open_cluster
from tailrace.planning.model_shape.base import ModelShape
from tailrace.planning.model_shape.catalogue import find_shape
from tailrace.planning.step_times.collectives import Group
from tailrace.planning.step_times.kernels import KernelStepTimes
from tailrace.planning.step_times.operators import Operator, Pass, decode, operators, prefill
from tailrace.planning.step_times.rates import Rates, seconds

DENSE = ("Qwen3-1.7B", "Qwen2.5-7B", "Qwen3-8B", "Qwen3-14B", "Qwen3-32B", "Qwen2.5-72B")
SPARSE = ("Qwen3-30B-A3B", "Qwen3-235B-A22B")
FITTED = "H100"
HELD_OUT = ("H200", "A100")
DEGREES = (1, 2, 4, 8)
DECODES = [(size, context) for size in (1, 8, 32, 128, 256) for context in (512, 2048, 8192, 32768)]
PREFILLS = [(1, 512), (1, 2048), (1, 8192), (1, 32768), (8, 512), (8, 2048)]
CACHE = 2**22
"""The most cached tokens of a step."""


@dataclass(frozen=True, slots=True)
class Step:
    """A step, and its seconds by the tables."""

    pool: Pool
    group: Group
    operators: Sequence[Operator]
    seconds: float

    def error(self, rates: Rates) -> float:
        """The logarithm of predicted over tabulated seconds."""
        predicted = sum(seconds(operator, self.pool.device, self.group, rates) for operator in self.operators)
        return math.log(predicted / self.seconds)


def steps(kind: str, models: Sequence[str]) -> Iterator[Step]:
    """Yield steps of models on a kind of device, whose weights fit."""
    pool = open_cluster(f"8x{kind}").pools[0]
    for shape in map(find_shape, models):
        kernels = KernelStepTimes(shape, kind)
        for tp in DEGREES:
            if shape.heads % tp or 2 * shape.parameters > tp * pool.device.memory_bytes:
                continue
            made = partial(_step, shape, pool, tp)
            for size, context in DECODES:
                if size * context <= CACHE:
                    yield made(decode(size, size * context), kernels.step_s(tp, size, size * context, 1))
            for sequences, length in PREFILLS:
                yield made(prefill(sequences, length), kernels.prefill_s(tp, sequences, length))


def _step(shape: ModelShape, pool: Pool, tp: int, work: Pass, tabulated: float) -> Step:
    return Step(pool, Group.of(pool, tp), list(operators(shape, work, tp=tp)), tabulated)


def fitted(found: Sequence[Step]) -> Rates:
    """Return the rates with the least mean error. They are searched as logarithms, from 0.7 of each peak up to 1."""

    def error(logarithms: np.ndarray) -> float:
        rates = _rates(logarithms)
        return statistics.fmean(abs(step.error(rates)) for step in found)

    start = np.log([2.5e-6 if field.name == "launch_s" else 0.7 for field in fields(Rates)])
    options = {"maxfev": 1000, "xatol": 1e-3, "fatol": 1e-5}
    best = minimize(error, start, method="Nelder-Mead", bounds=[(None, 0.0)] * len(start), options=options)
    return _rates(best.x)


def _rates(logarithms: np.ndarray) -> Rates:
    return Rates(**{field.name: math.exp(each) for field, each in zip(fields(Rates), logarithms, strict=True)})


def figures(found: Sequence[Step], rates: Rates) -> dict[str, float]:
    """Return the errors of step times, in percent."""
    errors = [100 * math.expm1(abs(step.error(rates))) for step in found]
    return {"median": round(statistics.median(errors), 1), "p90": round(float(np.quantile(errors, 0.9)), 1)}


def main() -> None:
    """Fit, print and compare."""
    own = [*steps(FITTED, DENSE), *steps(FITTED, SPARSE)]
    rates = fitted(own)
    for field in fields(Rates):
        print(f"{field.name}: {getattr(rates, field.name):.4g} (ships: {getattr(Rates(), field.name):.4g})")
    result = {
        f"{kind} {name}": figures(list(steps(kind, models)), Rates())
        for kind in (FITTED, *HELD_OUT)
        for name, models in (("dense", DENSE), ("experts", SPARSE))
    }
    print(json.dumps({"steps": len(own), "error_pct": result}))


if __name__ == "__main__":
    main()
