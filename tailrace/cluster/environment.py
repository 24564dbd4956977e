"""The environment of processes that are started here."""

import os
import secrets
import site
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import tailrace

if TYPE_CHECKING:  # who waits through a whole run, and needs one name of this, should take little memory
    from tailrace.config.cluster import PoolConfig

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


def importable(here: Mapping[str, str]) -> dict[str, str]:
    """`here`, with this installation of Tailrace importable."""
    root = str(Path(tailrace.__file__).parents[1])
    paths = [path for path in here.get("PYTHONPATH", "").split(os.pathsep) if path]
    if root not in (*site.getsitepackages(), *paths):
        paths.append(root)  # it runs from its sources
    return {**here, "PYTHONPATH": os.pathsep.join(paths)}


def environment(here: Mapping[str, str]) -> dict[str, str]:
    """The same without Ray's part."""
    return {name: value for name, value in importable(here).items() if not name.startswith("RAY_")}


def ray_environment(here: Mapping[str, str]) -> dict[str, str]:
    """`here` for a process that starts a Ray of its own. It must be set before Ray is imported."""
    chosen = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        # On Linux, too, Ray then takes 127.0.0.1 for the address of this machine, and listens there alone.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    }
    defaults = {
        "RAY_USAGE_STATS_ENABLED": "0",
        # Ray would kill keepers where memory runs low: they have little, and their workers would go with them.
        "RAY_memory_monitor_refresh_ms": "0",
        "RAY_worker_niceness": "0",  # or workers would give way to everybody, at 15
        # Ray would start an idle worker for each core, however many there are, and keepers are few.
        "RAY_prestart_worker_first_driver": "0",
        # Workers are told which GPUs they may see; Ray would warn that it will not do so for them any more.
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }
    return defaults | dict(here) | chosen


def worker_environment(here: Mapping[str, str], pool: "PoolConfig") -> dict[str, str]:
    """That of a worker of `pool`."""
    own = dict.fromkeys(_THREAD_VARIABLES, str(pool.threads_each))
    # where GPUs were reserved, Ray has told the keeper which
    return environment(here) | own | ({} if pool.gpus else {"CUDA_VISIBLE_DEVICES": ""})
