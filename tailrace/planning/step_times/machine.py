"""What was measured of one machine: engines and trainers, by themselves and beside each other."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec

from tailrace.errors import UNREADABLE, PlanError, one_line
from tailrace.planning.curves import Curve
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
    """Of a replica, while the others decode as many sequences: a line through all sizes of batches."""
    by_size: dict[Count, Annotated[float, msgspec.Meta(gt=0)]] = {}
    """How many times as long as by that line a step took, by the sequences of a replica."""
    install_s: NotNegative
    """Seconds in which it stands still for new weights."""

    def __post_init__(self) -> None:
        """Check that a decode step takes some time, without which a simulation would have no end."""
        if self.costs.base + self.costs.each <= 0:
            raise ValueError("a decode step takes 0 seconds")

    @property
    def times(self) -> "BentSteps":
        """Its steps."""
        return BentSteps(self.costs, self.by_size)

    @property
    def arrangement(self) -> tuple[int, int]:
        """TP and DP."""
        return self.tp, self.dp


class BentSteps:
    """Steps by a line, bent to what was measured with some sizes of batches; between these in proportion."""

    def __init__(self, line: StepCosts, by_size: Mapping[int, float]) -> None:
        """`by_size`: by how many times a step takes longer than by the line."""
        self._line = line
        self._factor = Curve.through(by_size.items() or [(1, 1.0)]).level()

    def step_s(
        self, tp: int, batch_size: float, context_tokens: float, replicas: int, others: float | None = None
    ) -> float:
        """See `StepTimes`."""
        return self._factor.at(batch_size) * self._line.step_s(tp, batch_size, context_tokens, replicas, others)

    def prefill_s(self, tp: int, batch_size: float, rms_length: float) -> float:
        """See `StepTimes`."""
        return self._line.prefill_s(tp, batch_size, rms_length)


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
