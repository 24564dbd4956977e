"""Claims on the file of a machine's profile."""

from pathlib import Path

import msgspec
import pytest

from tailrace.errors import PlanError
from tailrace.planning.dispatch.costs import StepCosts
from tailrace.planning.step_times.machine import BentSteps, EngineProfile, read_machine_profile
from tailrace.planning.step_times.trainer_profile import MicroBatchPoint
from tests.planner.machines import profile, trainer

REPLACE = msgspec.structs.replace
NO_TIME = MicroBatchPoint(tokens=100, scored=50, pairs=1.0, seconds=0.0)
STANDS_STILL = msgspec.json.encode(profile()).replace(b'"base":0.02,"each":0.0004', b'"base":0.0,"each":0.0')


def test_a_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_bytes(msgspec.json.encode(written := profile()))
    assert read_machine_profile(path) == written


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is no profile of a machine: "),
        (b"[]", "is no profile of a machine: "),
        (msgspec.json.encode(trainer(2, 0.002)), "is no profile of a machine: Object missing required field `cores`; "),
        (msgspec.json.encode(REPLACE(profile(), engines=[])), "length >= 1 - at `$.engines`; make one with tailrace"),
        (
            msgspec.json.encode(REPLACE(profile(), trainers=[REPLACE(trainer(2, 0.002), score=[])])),
            "`$.trainers[0].score`",
        ),
        (msgspec.json.encode(REPLACE(profile(), engine_beside=0.0)), "`float` > 0.0 - at `$.engine_beside`"),
        (STANDS_STILL, "a decode step takes 0 seconds"),
        (STANDS_STILL.replace(b"0.0", b"-1.0", 1), "`float` >= 0.0"),
        (
            msgspec.json.encode(REPLACE(profile(), trainers=[REPLACE(trainer(2, 0.1), update=[NO_TIME])])),
            "update[0].seconds",
        ),
        (msgspec.json.encode(REPLACE(profile(), tailrace_machine_profile=1)), "is a profile of another version; make"),
    ],
)
def test_what_is_no_profile_is_refused_in_one_line(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "profile.json"
    path.write_bytes(content)
    with pytest.raises(PlanError) as refused:
        read_machine_profile(path)
    assert said in str(refused.value)
    assert str(refused.value).startswith(str(path))


LINE = StepCosts(base=1.0, each=0.5, context=0.0, prefill=0.25)


def test_steps_are_those_that_were_measured_and_between_them_in_proportion() -> None:
    steps = BentSteps(LINE, {8: 1.0, 2: 2.0})
    factors = [steps.step_s(1, size, 0.0, 1) / LINE.step_s(1, size, 0.0, 1) for size in (1, 2, 5, 8, 16)]
    assert factors == pytest.approx([2.0, 2.0, 1.5, 1.0, 1.0])
    assert steps.prefill_s(1, 1, 8) == 2.0


def test_without_measured_sizes_the_line_counts() -> None:
    engine = EngineProfile(cores=1, costs=LINE, install_s=0.0)
    assert engine.times.step_s(1, 4, 0.0, 1) == LINE.step_s(1, 4, 0.0, 1)
