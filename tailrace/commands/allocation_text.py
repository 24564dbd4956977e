"""An allocation of devices in words, the same for plans and simulations."""

from tailrace.config.base import GIB
from tailrace.planner.trial import Plan
from tailrace.planning.allocation import Allocation, Engines
from tailrace.planning.memory import Memory


def engines_text(engines: Engines) -> str:
    """The devices that generate: `16 H100 2×TP4·DP2` are two engines of two replicas."""
    arrangement = f"{engines.engines}×TP{engines.tp}" + (f"·DP{engines.dp}" if engines.dp > 1 else "")
    return f"{engines.devices} {engines.pool.kind} {arrangement}"


def trainer_text(allocation: Allocation, *, critic: bool = False) -> str:
    """The devices that train the policy, or its critic, in their arrangement."""
    layout = allocation.critic if critic else allocation.layout
    assert layout is not None, "there is a critic"
    each = {"TP": layout.tp, "PP": layout.pp, "DP": layout.dp}
    degrees = "·".join(f"{name}{degree}" for name, degree in each.items() if degree > 1)
    further = [degrees] if degrees else []
    further += [] if layout.sharding == "none" else [str(layout.sharding)]
    further += ["recompute"] if layout.checkpointing == "full" else []
    further += ["offload"] if layout.offload else []
    return " ".join([f"{layout.devices} {allocation.trainer.kind}", *further])


def memory_text(memory: Memory) -> str:
    """The memory of a device at the worst instant, where the longest sample that is allowed is there."""
    return f"{memory.peak / GIB:.1f} GiB at the {memory.worst}"


def interval_text(plan: Plan) -> str:
    """What makes the interval: the times of engines and trainer, and the lengths that were drawn."""
    engines, trainer = plan.bases.engines, plan.bases.trainer
    return (
        f"engines ± {100 * engines.error:.0f} %, {engines.kind}; trainer ± {100 * trainer.error:.0f} %; other draws "
        f"{draws_text(plan)}"
    )


def draws_text(plan: Plan) -> str:
    """How much other draws of the lengths change a step."""
    shorter, longer = (f"{100 * (side - 1):+.0f}" for side in plan.draws)
    return f"{shorter} to {longer} %"
