"""The parts of a device's peak rates that kinds of operators reach, and what a host takes of a step besides.

The rates are the same for all devices and models. `DEFAULT` was fitted by `benchmarks/rates_fit.py` to the kernel
tables of H100 under vLLM (`kernels`): decode steps and prefills of six dense models from 1.7B to 72B and two with
experts, TP 1 to 8. Errors of the sums, in percent, as the median and what nine of ten steps are within:

    H100, fitted        dense 2.1, 6.8      experts 4.0, 9.8
    H200, not fitted    dense 2.9, 9.3      experts 5.3, 12.4
    A100, not fitted    dense 20.0, 32.6    experts 31.6, 56.9

A100 takes longer than predicted in decode steps: its kernels reach a smaller part of the peak rates.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from tailrace.config.hardware import DeviceConfig, DType
from tailrace.planning.step_times.collectives import Group, all_gather_s, all_reduce_s, reduce_scatter_s
from tailrace.planning.step_times.operators import Operator


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Parts of peak rates, and seconds that each operator takes besides."""

    product: float = 0.79
    """Part of the peak rate that large matrix products reach."""
    grouped: float = 0.52
    """Part of the peak rate that the products of experts reach, which are many small ones."""
    product_memory: float = 0.85
    """Part of the memory's bandwidth that small matrix products reach."""
    attention: float = 0.65
    """Part of the peak rate that attention reaches."""
    attention_memory: float = 0.93
    """Part of the memory's bandwidth that attention reaches, as it reads the cache."""
    memory: float = 0.61
    """Part of the memory's bandwidth that all else reaches."""
    exchange: float = 0.71
    """Part of a link's bandwidth that exchanges reach."""
    launch_s: float = 2.6e-6
    """Seconds that an operator takes beside its work, when it is launched from a graph."""


DEFAULT = Rates()

ERROR = 0.33
"""Nine of ten steps of dense models are within this relative error also on A100, which nothing was fitted on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """What an engine's host takes of a step while the device waits."""

    step_s: float = 0.0
    sequence_s: float = 0.0
    """For each sequence that gets a token."""
    overlaps: bool = False
    """Whether it prepares a step while the device computes the one before."""

    def seconds(self, sequences: float) -> float:
        """Seconds that the host works for a step in which so many sequences get a token."""
        return self.step_s + sequences * self.sequence_s

    def step(self, device_s: float, sequences: float) -> float:
        """Seconds of a step that takes the device `device_s`."""
        own = self.seconds(sequences)
        return max(device_s, own) if self.overlaps else device_s + own


NO_HOST = Host()
HOSTS: Mapping[str, Host] = {
    "vllm": Host(step_s=0.89e-3, sequence_s=22e-6),
    "vllm-async": Host(step_s=0.89e-3, sequence_s=22e-6, overlaps=True),
    "trtllm": Host(step_s=0.37e-3, sequence_s=4e-6),
}
"""By backend, as `benchmarks/simulator_tpot.py` fitted them to one half of published measurements of serving. Those of
vLLM are of 0.12; since 0.14 its scheduler is asynchronous by default, for which the same work of the host is taken."""

PACKING = frozenset({"H20", "H100", "H200", "H800", "B200", "GB200"})
"""Devices whose attention puts all query heads that share keys into one tile, or decodes in a kernel of its own."""
TILE_ROWS = 64
"""Rows of a tile of FlashAttention 2, which vLLM has on other devices."""


def rows_of_decoding(kind: str) -> int:
    """Rows that a sequence takes in attention that decodes it beside prompts, on a kind of device.

    FlashAttention 2 computes both in one kernel, in which each query head of the sequence takes a whole tile.
    """
    return 1 if kind in PACKING else TILE_ROWS


_ROUNDING = 4.0
"""The exponent of the norm that joins the two times of an operator; with infinity, the longer one counts alone."""


def seconds(operator: Operator, device: DeviceConfig, group: Group, rates: Rates, dtype: DType = "bfloat16") -> float:
    """Seconds of an operator, all of its `count` together.

    The roofline of Williams et al. 2009, rounded where its two lines meet: neither work hides the other wholly there.
    """
    memory = device.memory_gb_s * 1e9
    match operator.kind:
        case "product" | "grouped":
            rate = rates.product if operator.kind == "product" else rates.grouped
            compute = operator.flops / (device.flops(dtype) * rate)
            each = _overlapped(compute, operator.read_bytes / (memory * rates.product_memory))
        case "attention":
            compute = operator.flops / (device.flops("bfloat16") * rates.attention)
            each = _overlapped(compute, operator.read_bytes / (memory * rates.attention_memory))
        case "memory":
            each = operator.read_bytes / (memory * rates.memory)
        case "exchange":
            each = all_reduce_s(operator.exchanged_bytes, group, rates.exchange)
        case "dispatch":
            each = all_gather_s(operator.exchanged_bytes, group, rates.exchange)
            each += reduce_scatter_s(operator.exchanged_bytes, group, rates.exchange)
    return operator.count * (each + operator.launches * rates.launch_s)


def _overlapped(compute_s: float, memory_s: float) -> float:
    longer, shorter = max(compute_s, memory_s), min(compute_s, memory_s)
    return longer * (1 + (shorter / longer) ** _ROUNDING) ** (1 / _ROUNDING) if longer else 0.0
