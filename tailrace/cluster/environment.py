"""The environment variables of the processes that are started here."""

import os
import secrets
import site
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import tailrace

if TYPE_CHECKING:  # the cleanup process waits through a whole run, and should take little memory
    from tailrace.config.cluster import PoolConfig

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


def importable(here: Mapping[str, str]) -> dict[str, str]:
    """Return the environment `here`, with this installation of Tailrace importable."""
    root = str(Path(tailrace.__file__).parents[1])
    paths = [path for path in here.get("PYTHONPATH", "").split(os.pathsep) if path]
    if root not in (*site.getsitepackages(), *paths):
        paths.append(root)  # Tailrace runs from its sources
    return {**here, "PYTHONPATH": os.pathsep.join(paths)}


def environment(here: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of `importable`, without Ray's variables."""
    return {name: value for name, value in importable(here).items() if not name.startswith("RAY_")}


def ray_environment(here: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a process that starts Ray, based on `here`. It must be set before Ray is imported."""
    chosen = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        # With this Ray takes 127.0.0.1 as the address of this machine on Linux too, and listens there alone.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    }
    defaults = {
        "RAY_USAGE_STATS_ENABLED": "0",
        # Ray would kill keepers when memory runs low. They take little memory, and their workers would die too.
        "RAY_memory_monitor_refresh_ms": "0",
        "RAY_worker_niceness": "0",  # else workers would run at niceness 15
        # Ray would start an idle worker for each core, but there are few keepers.
        "RAY_prestart_worker_first_driver": "0",
        # `worker_environment` hides GPUs from workers without one. Ray would warn that it will no longer do so.
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }
    return defaults | dict(here) | chosen


def worker_environment(here: Mapping[str, str], pool: "PoolConfig") -> dict[str, str]:
    """Return the environment of a worker of `pool`, based on `here`."""
    own = dict.fromkeys(_THREAD_VARIABLES, str(pool.threads_each))
    # If GPUs were reserved, Ray has set the variable in the keeper.
    return environment(here) | own | ({} if pool.gpus else {"CUDA_VISIBLE_DEVICES": ""})
