"""What was measured of one machine: engines and trainers, by themselves and beside each other."""

from pathlib import Path
from typing import Annotated

import msgspec

from tailrace.errors import UNREADABLE, PlanError, one_line
from tailrace.planning.dispatch.costs import NotNegative, StepCosts
from tailrace.planning.step_times.trainer_profile import TrainerProfile

FORMAT = 2
Count = Annotated[int, msgspec.Meta(ge=1)]


class EngineProfile(msgspec.Struct, frozen=True, kw_only=True):
    """An engine whose ranks share its cores."""

    cores: Count
    """Of all ranks."""
    tp: Count = 1
    dp: Count = 1
    costs: StepCosts
    """Of a replica, while the others decode as many sequences."""
    install_s: NotNegative
    """Seconds in which it stands still for new weights."""

    def __post_init__(self) -> None:
        """Check that a decode step takes some time, without which a simulation would have no end."""
        if self.costs.base + self.costs.each <= 0:
            raise ValueError("a decode step takes 0 seconds")

    @property
    def arrangement(self) -> tuple[int, int]:
        """TP and DP."""
        return self.tp, self.dp


class MachineProfile(msgspec.Struct, frozen=True, kw_only=True):
    """The measurements of a machine; see `tailrace profile machine`.

    Engines and trainers were measured with all cores, and with half of them while the others were idle.
    """

    tailrace_machine_profile: int = FORMAT
    model: str
    hardware: str
    cores: Annotated[int, msgspec.Meta(ge=2)]
    engines: Annotated[list[EngineProfile], msgspec.Meta(min_length=1)]
    trainers: Annotated[list[TrainerProfile], msgspec.Meta(min_length=1)]
    engine_beside: Annotated[float, msgspec.Meta(gt=0)]
    """How many times longer a step of the engine takes while a trainer computes on the other half."""
    trainer_beside: Annotated[float, msgspec.Meta(gt=0)]
    """How many times longer an update takes while an engine generates on the other half."""

    @property
    def half(self) -> int:
        """Half of the cores."""
        return self.cores // 2

    def arrangements(self, cores: int) -> list[tuple[int, int]]:
        """The TP and DP with which engines on so many cores were measured."""
        return [engine.arrangement for engine in self.engines if engine.cores == cores]

    def engine(self, cores: int, *, tp: int = 1, dp: int = 1) -> EngineProfile:
        """The engine with so many cores, TP and DP.

        Raises:
            PlanError: it was not measured.
        """
        for engine in self.engines:
            if engine.cores == cores and engine.arrangement == (tp, dp):
                return engine
        raise PlanError(f"no engine of TP {tp} and DP {dp} on {cores} cores was measured; profile the machine anew")

    def trainer(self, cores: int) -> TrainerProfile:
        """The trainer with so many cores.

        Raises:
            PlanError: it was not measured.
        """
        for trainer in self.trainers:
            if trainer.threads == cores:
                return trainer
        raise PlanError(f"no trainer on {cores} cores was measured; profile the machine anew")


def read_machine_profile(path: Path) -> MachineProfile:
    """Read a profile that `tailrace profile machine` has written.

    Raises:
        PlanError: there is no such file, or it is no such profile.
    """
    try:
        profile = msgspec.json.decode(path.read_bytes(), type=MachineProfile)
    except OSError as error:
        raise PlanError(f"{path} cannot be read: {error.strerror or one_line(error)}") from None
    except UNREADABLE as error:
        raise PlanError(
            f"{path} is no profile of a machine: {one_line(error)}; make one with tailrace profile machine"
        ) from None
    if profile.tailrace_machine_profile != FORMAT:
        raise PlanError(f"{path} is a profile of another version; make it anew with tailrace profile machine")
    return profile
