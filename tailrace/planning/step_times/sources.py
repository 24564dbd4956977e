"""The step times that are known best: a profile, measured kernels where there are tables of them, or analytic ones."""

import importlib.util
from collections.abc import Collection, Iterable

from tailrace.config.hardware import DType
from tailrace.errors import PlanError
from tailrace.planning.hardware.base import Pool
from tailrace.planning.hardware.catalogue import catalogue, device_called
from tailrace.planning.model_shape.base import ModelShape
from tailrace.planning.step_times.basis import Source
from tailrace.planning.step_times.calibrated import CalibratedStepTimes
from tailrace.planning.step_times.generation import AnalyticStepTimes
from tailrace.planning.step_times.kernels import SYSTEMS, KernelStepTimes
from tailrace.planning.step_times.rates import HOSTS
from tailrace.planning.tp_profile import TPProfile

_HOST = "vllm-async"
"""Whose host is taken for engines on accelerators: it decides a step while the one before is computed."""
_RATES = ("tflops", "memory_gb_s", "link_gb_s", "link_us", "switched")
"""Figures of a device that measured kernels have in them."""


def check_profile(profile: TPProfile, shape: ModelShape, pools: Iterable[Pool], dtypes: Collection[str]) -> None:
    """Check that a profile is of the model, and of devices of one of the pools.

    `dtypes`: those of engines, one of which it has to be of.

    Raises:
        PlanError: it is not.
    """
    own = {"layers": shape.layers, "hidden_size": shape.hidden, "kv_heads": shape.kv_heads}
    measured = {key: profile.key.architecture.get(key) for key in own}
    if measured != own:
        raise PlanError(
            f"the profile is of {profile.key.model}, which has {measured}, and {shape.name} has {own}; give a profile "
            "of this model: tailrace profile tp"
        )
    kinds = [pool.kind for pool in pools]
    if not any(_is_of(profile, kind) for kind in kinds):
        raise PlanError(
            f"the profile is of {profile.key.hardware}, and the cluster has {', '.join(kinds)}; give a profile of one "
            "of these, or leave it out"
        )
    if profile.key.dtype not in dtypes:
        raise PlanError(
            f"the profile was measured in {profile.key.dtype}, and engines compute in {' and '.join(sorted(dtypes))}; "
            "give a profile of that, or change engine.dtype"
        )


def calibrated(profile: TPProfile, shape: ModelShape, pool: Pool, dtype: DType = "bfloat16") -> Source | None:
    """Analytic step times of engines on a pool, scaled by a profile of the model; None where it is of other devices or
    of another dtype."""
    if not _is_of(profile, pool.kind) or profile.key.dtype != dtype:
        return None
    return CalibratedStepTimes.fitted(AnalyticStepTimes(shape, pool, dtype=dtype, host=HOSTS[_HOST]), profile)


def _is_of(profile: TPProfile, kind: str) -> bool:
    found = device_called(profile.key.hardware)
    return profile.key.hardware == kind or (found is not None and found[0] == kind)


def source_of(shape: ModelShape, pool: Pool, degrees: Iterable[int], dtype: DType = "bfloat16") -> Source:
    """Return the step times of engines on a pool.

    Kernel tables need the extra `plan`. Times are analytic without that, where a cluster file gives the devices other
    rates, and where the tables lack the model under one of the degrees, so that degrees are compared by one source.

    `degrees`: of TP, that engines may have. `dtype`: of weights, keys and values; the tables have bfloat16.
    """
    host = HOSTS[_HOST]
    has_tables = pool.kind in SYSTEMS and _is_known(pool) and shape.latent is None and dtype == "bfloat16"
    if has_tables and importlib.util.find_spec("aiconfigurator_core") is not None:
        kernels = KernelStepTimes(shape, pool.kind, backend="vllm", host=host)
        if all(map(kernels.has, degrees)):
            return kernels
    return AnalyticStepTimes(shape, pool, dtype=dtype, host=host)


def _is_known(pool: Pool) -> bool:
    """Whether its devices are as fast as the catalogue's of that kind; a cluster file may give others by that name."""
    known = catalogue().get(pool.kind)
    return known is not None and all(getattr(pool.device, rate) == getattr(known, rate) for rate in _RATES)
