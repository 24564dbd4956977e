"""What was measured of one machine: an engine and a trainer, by themselves and beside each other."""

import msgspec

from tailrace.planning.dispatch.costs import StepCosts
from tailrace.planning.step_times.trainer_profile import TrainerProfile

FORMAT = 1


class EngineProfile(msgspec.Struct, frozen=True, kw_only=True):
    """An engine of one replica."""

    threads: int
    costs: StepCosts
    install_s: float
    """Seconds in which it stands still for new weights."""


class MachineProfile(msgspec.Struct, frozen=True, kw_only=True):
    """The measurements of a machine; see `tailrace profile machine`."""

    tailrace_machine_profile: int = FORMAT
    model: str
    hardware: str
    cores: int
    together: EngineProfile
    """An engine with all cores."""
    trainer_together: TrainerProfile
    """A trainer with all cores."""
    apart: EngineProfile
    """An engine with half of the cores, while the others are idle."""
    trainer_apart: TrainerProfile
    engine_beside: float
    """How many times longer a step of the engine takes while a trainer computes on the other half."""
    trainer_beside: float
    """How many times longer an update takes while an engine generates on the other half."""
