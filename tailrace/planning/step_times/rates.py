"""The parts of a device's peak rates that kinds of operators reach.

They are the same for all devices. `DEFAULT` was fitted to kernels that were measured on H100 (docs/planning.md).
"""

from dataclasses import dataclass

from tailrace.config.hardware import DeviceConfig, DType
from tailrace.planning.step_times.collectives import Group, all_reduce_s
from tailrace.planning.step_times.operators import Operator


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Parts of peak rates, and seconds that each operator takes besides."""

    product: float = 0.72
    """Part of the peak rate that large matrix products reach."""
    product_memory: float = 0.82
    """Part of the memory's bandwidth that small matrix products reach."""
    attention: float = 0.5
    """Part of the peak rate that attention reaches."""
    attention_memory: float = 0.9
    """Part of the memory's bandwidth that attention reaches, as it reads the cache."""
    memory: float = 0.75
    """Part of the memory's bandwidth that all else reaches."""
    exchange: float = 0.75
    """Part of a link's bandwidth that exchanges reach."""
    launch_s: float = 2.5e-6
    """Seconds that an operator takes beside its work, when it is launched from a graph."""


DEFAULT = Rates()

_ROUNDING = 4.0
"""The exponent of the norm that joins the two times of an operator; with infinity, the longer one counts alone."""


def seconds(operator: Operator, device: DeviceConfig, group: Group, rates: Rates, dtype: DType = "bfloat16") -> float:
    """Seconds of an operator, all of its `count` together.

    The roofline of Williams et al. 2009, rounded where its two lines meet: neither work hides the other wholly there.
    """
    memory = device.memory_gb_s * 1e9
    match operator.kind:
        case "product":
            compute = operator.flops / (device.flops(dtype) * rates.product)
            each = _overlapped(compute, operator.read_bytes / (memory * rates.product_memory))
        case "attention":
            compute = operator.flops / (device.flops("bfloat16") * rates.attention)
            each = _overlapped(compute, operator.read_bytes / (memory * rates.attention_memory))
        case "memory":
            each = operator.read_bytes / (memory * rates.memory)
        case "exchange":
            each = all_reduce_s(operator.exchanged_bytes, group, rates.exchange)
    return operator.count * (each + rates.launch_s)


def _overlapped(compute_s: float, memory_s: float) -> float:
    longer, shorter = max(compute_s, memory_s), min(compute_s, memory_s)
    return longer * (1 + (shorter / longer) ** _ROUNDING) ** (1 / _ROUNDING) if longer else 0.0
