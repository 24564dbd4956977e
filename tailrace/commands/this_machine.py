"""The device of this machine as an entry of the hardware catalogue: by its name, or measured in half a second."""

import statistics
from collections.abc import Callable, Collection

import psutil
import torch

from tailrace.config.base import GIB
from tailrace.config.hardware import DeviceConfig, DType
from tailrace.host.compute import now
from tailrace.planner.outlook import Machine
from tailrace.planning.hardware.catalogue import device_called

PROBE = 1536
"""Rows and columns of the matrices with which a device is measured."""
_DTYPES: dict[DType, torch.dtype] = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def this_machine(device: str, dtypes: Collection[DType]) -> Machine:
    """Return what runs on the torch device `device` compute on: a kind of the catalogue, or else what is measured here.

    `dtypes`: those that are measured; one at least.
    """
    target = torch.device(device)
    name = torch.cuda.get_device_name(target) if target.type == "cuda" else "this machine's CPU"
    if (known := device_called(name)) is not None:
        return Machine(kind=known[0], device=known[1])
    threads = torch.get_num_threads() if target.type == "cpu" else None
    return Machine(kind=name, device=_measured(target, dtypes), threads=threads, is_measured=True)


def _measured(target: torch.device, dtypes: Collection[DType]) -> DeviceConfig:
    """Links lead through the same memory. Nobody asks for its price or its power: these stand for none."""
    rates = {dtype: _tflops(target, _DTYPES[dtype]) for dtype in dtypes}
    memory = max(_gb_s(target, _DTYPES[dtype]) for dtype in dtypes)
    properties = torch.cuda.get_device_properties(target) if target.type == "cuda" else None
    size = psutil.virtual_memory().total if properties is None else properties.total_memory
    copied = memory / 2  # each byte is read and written
    return DeviceConfig(
        tflops={"bfloat16": min(rates.values()), **rates},
        memory_gib=size / GIB,
        memory_gb_s=memory,
        link_gb_s=copied,
        network_gb_s=copied,
        host_gb_s=copied,
        devices_per_node=1,
        watts=1.0,
        usd_per_hour=1.0,
    )


def _tflops(target: torch.device, dtype: torch.dtype) -> float:
    """The rate of a large matrix product."""
    matrix = torch.randn(PROBE, PROBE, device=target).to(dtype)
    return 2 * PROBE**3 / _median_seconds(lambda: matrix @ matrix, target) / 1e12


def _gb_s(target: torch.device, dtype: torch.dtype) -> float:
    """The rate at which a matrix-vector product reads memory."""
    large = torch.randn(16 * PROBE, PROBE, device=target).to(dtype)
    vector = torch.randn(PROBE, 1, device=target).to(dtype)
    return large.numel() * large.element_size() / _median_seconds(lambda: large @ vector, target) / 1e9


def _median_seconds(work: Callable[[], object], target: torch.device, repeats: int = 7) -> float:
    def once() -> float:
        start = now(target)
        work()
        return now(target) - start

    once()
    return statistics.median(once() for _ in range(repeats))
