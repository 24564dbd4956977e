"""The step times that are known best: measured kernels where there are tables of them, else analytic ones."""

import importlib.util
from collections.abc import Iterable

from tailrace.config.hardware import DType
from tailrace.planning.hardware.base import Pool
from tailrace.planning.model_shape.base import ModelShape
from tailrace.planning.step_times.basis import Source
from tailrace.planning.step_times.generation import AnalyticStepTimes
from tailrace.planning.step_times.kernels import SYSTEMS, KernelStepTimes
from tailrace.planning.step_times.rates import HOSTS

_HOST = "vllm-async"
"""Whose host is taken for engines on accelerators: it decides a step while the one before is computed."""


def source_of(shape: ModelShape, pool: Pool, degrees: Iterable[int], dtype: DType = "bfloat16") -> Source:
    """Return the step times of engines on a pool.

    Kernel tables need the extra `plan`. Times are analytic without that, and where the tables lack the model under one
    of the degrees, so that degrees are compared by one source.

    `degrees`: of TP, that engines may have. `dtype`: of weights, keys and values; the tables have bfloat16.
    """
    host = HOSTS[_HOST]
    has_tables = pool.kind in SYSTEMS and shape.latent is None and dtype == "bfloat16"
    if has_tables and importlib.util.find_spec("aiconfigurator_core") is not None:
        kernels = KernelStepTimes(shape, pool.kind, backend="vllm", host=host)
        if all(map(kernels.has, degrees)):
            return kernels
    return AnalyticStepTimes(shape, pool, dtype=dtype, host=host)
