"""A profile of this machine: of real engines and trainers, complete, and never left half written."""

import os
from pathlib import Path

import pytest

from tailrace.commands import profile_machine as module
from tailrace.commands.profile_machine import in_process, measure_machine, profile_machine
from tailrace.config.load import load_config
from tailrace.config.run import RunConfig
from tailrace.errors import PlanError, UserError
from tailrace.host.cpu import cpu_name, usable_cores
from tailrace.planning.packing import GroupPart
from tailrace.planning.step_times.machine import read_machine_profile
from tailrace.planning.step_times.trainer_profile import ProfiledTrainer
from tests.conftest import TinyModel
from tests.helpers.bench import write_recipe


def recipe(tmp_path: Path, tiny_model: TinyModel) -> RunConfig:
    small = ["trainer.micro_batch_tokens=64", "trainer.precision=fp32", "threads=null"]
    return load_config(write_recipe(tmp_path, tiny_model), small)


def test_a_measuring_process_that_dies_is_one_line() -> None:
    with pytest.raises(PlanError, match=r"^a process that measured has died: this machine may have too little memory"):
        in_process(os._exit, 1)


@pytest.mark.skipif(len(usable_cores()) < 2, reason="an engine beside a trainer takes two cores")
def test_engines_and_trainers_are_measured_by_themselves_and_beside_each_other(
    tmp_path: Path, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = usable_cores()[:2]
    monkeypatch.setattr(module, "usable_cores", lambda: [first, second])
    profile_machine(recipe(tmp_path, tiny_model), tmp_path / "machine.json")
    profile = read_machine_profile(tmp_path / "machine.json")
    assert (profile.hardware, profile.cores, profile.half) == (cpu_name(), 2, 1)
    assert {(one.cores, one.tp, one.dp) for one in profile.engines} == {(2, 1, 1), (2, 1, 2), (2, 2, 1), (1, 1, 1)}
    for engine in profile.engines:
        assert sorted(engine.by_size) == [size for size in (1, 2, 4, 8) if size * engine.dp <= 8]
        assert all(engine.times.step_s(1, size, 64 * size, 1) > 0 for size in engine.by_size)
        assert engine.install_s > 0
    assert [one.threads for one in profile.trainers] == [2, 1]
    for trainer in map(ProfiledTrainer, profile.trainers):
        assert trainer.update_s([GroupPart((0,), 16, (48,))]) > 0
        assert trainer.optimizer_s() > 0
    assert profile.engine_beside > 0
    assert profile.trainer_beside > 0


def test_an_existing_profile_is_kept(tmp_path: Path, tiny_model: TinyModel) -> None:
    (path := tmp_path / "machine.json").write_text("mine")
    with pytest.raises(UserError, match=r"machine\.json exists"):
        profile_machine(recipe(tmp_path, tiny_model), path)
    assert path.read_text() == "mine"


def test_one_core_is_too_few(tmp_path: Path, tiny_model: TinyModel) -> None:
    only = usable_cores()[0]
    said = rf"^this process may use the cores \[{only}\]; an engine beside a trainer takes two$"
    with pytest.raises(PlanError, match=said):
        measure_machine(recipe(tmp_path, tiny_model), [only])
