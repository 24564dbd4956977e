"""The step times that are known best: measured kernels where there are tables of them, else analytic ones."""

import importlib.util

from tailrace.planning.hardware.base import Pool
from tailrace.planning.model_shape.base import ModelShape
from tailrace.planning.step_times.basis import Source
from tailrace.planning.step_times.generation import AnalyticStepTimes
from tailrace.planning.step_times.kernels import SYSTEMS, KernelStepTimes
from tailrace.planning.step_times.rates import HOSTS

_HOST = "vllm-async"
"""Whose host is taken for engines on accelerators: it decides a step while the one before is computed."""


def source_of(shape: ModelShape, pool: Pool, tp: int | None = None) -> Source:
    """Return the step times of engines on a pool.

    Kernel tables need the extra `plan`; they have no latent attention. Without them, times are analytic.

    `tp`: a degree that the tables have to have; by default they are taken without a look.
    """
    host = HOSTS[_HOST]
    has_tables = pool.kind in SYSTEMS and shape.latent is None
    if has_tables and importlib.util.find_spec("aiconfigurator_core") is not None:
        kernels = KernelStepTimes(shape, pool.kind, backend="vllm", host=host)
        if tp is None or kernels.has(tp):
            return kernels
    return AnalyticStepTimes(shape, pool, host=host)
