"""What was measured of one machine: an engine and a trainer, by themselves and beside each other."""

from pathlib import Path

import msgspec

from tailrace.errors import UNREADABLE, PlanError, one_line
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


def read_machine_profile(path: Path) -> MachineProfile:
    """Read a profile that `tailrace profile machine` has written.

    Raises:
        PlanError: there is no such file, or it is no such profile.
    """
    remedy = "make one with tailrace profile machine"
    try:
        profile = msgspec.json.decode(path.read_bytes(), type=MachineProfile)
    except OSError as error:
        raise PlanError(f"{path} cannot be read: {error.strerror or one_line(error)}") from None
    except UNREADABLE as error:
        raise PlanError(f"{path} is no profile of a machine: {one_line(error)}; {remedy}") from None
    if profile.tailrace_machine_profile != FORMAT:
        raise PlanError(f"{path} is a profile of another version; {remedy}")
    return profile
