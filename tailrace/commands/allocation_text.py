"""An allocation of devices in words, the same for plans and simulations."""

from tailrace.config.base import GIB
from tailrace.planning.allocation import Allocation
from tailrace.planning.memory import Memory


def engines_text(allocation: Allocation) -> str:
    """The devices that generate: `16 H100 2×TP4·DP2` are two engines of two replicas."""
    arrangement = f"{allocation.engines}×TP{allocation.tp}" + (f"·DP{allocation.dp}" if allocation.dp > 1 else "")
    return f"{allocation.rollout_devices} {allocation.rollout.kind} {arrangement}"


def trainer_text(allocation: Allocation) -> str:
    """The devices that train, in their arrangement."""
    layout = allocation.layout
    each = {"TP": layout.tp, "PP": layout.pp, "DP": layout.dp}
    degrees = "·".join(f"{name}{degree}" for name, degree in each.items() if degree > 1)
    further = [degrees] if degrees else []
    further += [] if layout.sharding == "none" else [str(layout.sharding)]
    further += ["recompute"] if layout.checkpointing == "full" else []
    further += ["offload"] if layout.offload else []
    return " ".join([f"{layout.devices} {allocation.trainer.kind}", *further])


def memory_text(memory: Memory) -> str:
    """The memory of a device at the worst instant."""
    return f"{memory.peak / GIB:.1f} GiB at the {memory.worst}"
