"""Claims on what is foretold of a run: by a plan before it, and by a simulation after it."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from tailrace.commands.dry_run import print_plan
from tailrace.commands.foretell import foretold_after, foretold_by
from tailrace.config.run import RunConfig
from tailrace.errors import PlanError, UserError
from tailrace.events import Event, read_events
from tailrace.planner.search import plan
from tailrace.planning.foretold import Foretold, read_foretold
from tailrace.run.train import train
from tests.conftest import Command, TinyModel
from tests.helpers.runs import small_run, steps_of, write_prompts
from tests.planner.machines import engine, profile, trainer
from tests.planner.problems import problem_of
from tests.planning.foretold import foretold
from tests.report.test_page import words


@pytest.fixture
def recipe(tmp_path: Path, tiny_model: TinyModel) -> Callable[..., RunConfig]:
    prompts = write_prompts(tmp_path / "prompts.jsonl")
    return partial(small_run, tmp_path / "run", tiny_model("llama"), prompts)


def planned(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    """The keys of a recipe with a plan."""
    path = tmp_path / "recipe.plan.json"
    path.write_bytes(msgspec.json.encode(foretold(**changes)))
    return {"tensorboard": False, "plan": str(path)}


def test_a_plan_foretells_what_its_table_says() -> None:
    plans = plan(problem_of("4xH100", "pipeline.placement=separated", "pipeline.max_staleness=1"), candidates=2)
    found, best = foretold_by(plans), plans.best
    assert found.figures.step_s == pytest.approx(best.step_s, rel=0.02)
    assert found.figures.generation_s == pytest.approx(best.summary.generating * best.step_s, rel=0.1)
    assert found.figures.training_s == pytest.approx(best.summary.training * best.step_s, rel=0.1)
    assert found.figures.samples == 64
    engines = best.candidate.engines
    assert found.figures.engines == engines.engines
    assert found.least_s < found.figures.step_s < found.most_s
    assert found.memory["trainer"].bytes == best.trainer.peak
    assert found.trainer_devices == best.allocation.layout.devices
    assert found.memory["rollout"].instant == best.engine.worst
    assert found.decode.step_s(1, 8, 8 * 500, 1) == pytest.approx(
        plans.problem.source(engines).step_s(engines.tp, 8, 8 * 500, 1), rel=0.3
    )


def test_a_run_takes_its_plan_along_and_is_compared_with_it(tmp_path: Path, recipe: Callable[..., RunConfig]) -> None:
    config = recipe(observe=planned(tmp_path), trainer__steps=2)
    assert train(config, resume=False) == 0
    run = Path(config.output_dir)
    assert read_foretold(run / "plan.json") == foretold()
    page = words((run / "report.html").read_text())
    assert "Plan against reality A step took " in page
    assert "Foretold of small under math on 4 H100" in page


def test_a_resumed_run_keeps_the_plan_that_it_began_with(
    tmp_path: Path, recipe: Callable[..., RunConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    observe = planned(tmp_path)
    assert train(recipe(observe=observe, trainer__steps=2), resume=False) == 0
    Path(observe["plan"]).write_text("damaged since")
    longer = recipe(observe=observe, trainer__steps=4)
    capsys.readouterr()
    print_plan(longer, resume=True)
    assert f"# time by its plan: {foretold().figures.step_s:.1f} s a step" in capsys.readouterr().out
    assert train(longer, resume=True) == 0
    run = Path(longer.output_dir)
    assert len(steps_of(run)) == 4
    assert read_foretold(run / "plan.json") == foretold()


def test_a_dry_run_says_that_its_plan_has_more_trainers(
    tmp_path: Path, recipe: Callable[..., RunConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    for devices, says in ((1, False), (16, True)):
        print_plan(recipe(observe=planned(tmp_path, trainer_devices=devices)), resume=False)
        assert ("a trainer on 16 devices, and trainer.backend.type=single has one" in capsys.readouterr().out) == says


def test_a_damaged_plan_is_refused_before_anything_is_made(tmp_path: Path, recipe: Callable[..., RunConfig]) -> None:
    observe = planned(tmp_path)
    Path(observe["plan"]).write_text('{"tailrace_plan": 1}')
    config = recipe(observe=observe)
    for begin in (partial(train, config, resume=False), partial(print_plan, config, resume=False)):
        with pytest.raises(PlanError, match=r"observe\.plan .*recipe\.plan\.json' is no prediction: Object missing"):
            begin()
    assert not Path(config.output_dir).exists()


def test_a_recipe_that_was_planned_names_what_was_foretold_of_it(tmp_path: Path, tailrace_here: Command) -> None:
    output = tmp_path / "planned.yaml"
    given = ("--model", "Qwen2.5-1.5B", "--cluster", "4xH100", "--workload", "math-32b", "--steps", "1")
    command = ("plan", "grpo", "sampling.max_new_tokens=16384", *given, "--candidates", "2")
    done = tailrace_here(*command, "--json", "--output", str(output))
    assert done.returncode == 0, done.stderr
    found = read_foretold(output.parent / yaml.safe_load(output.read_text())["observe"]["plan"])
    best = json.loads(done.stdout)["plans"][0]
    assert found.figures.step_s == pytest.approx(best["step_s"], rel=0.02)
    output.unlink()
    again = tailrace_here(*command, "--output", str(output))
    assert again.returncode == 2
    assert "planned.plan.json exists" in again.stderr


def test_a_colocated_plan_is_read_by_a_dry_run(tmp_path: Path, tailrace_here: Command) -> None:
    output = tmp_path / "planned.yaml"
    given = ("--model", "Qwen2.5-1.5B", "--cluster", "1xH100", "--workload", "math-32b", "--steps", "1")
    done = tailrace_here("plan", "grpo", "sampling.max_new_tokens=16384", *given, "--output", str(output))
    assert done.returncode == 0, done.stderr
    recipe = yaml.safe_load(output.read_text())
    assert recipe["pipeline"]["placement"] == "colocated"
    assert read_foretold(output.parent / recipe["observe"]["plan"]).trainer_devices == 1


def test_a_run_without_a_plan_is_compared_with_a_simulation_of_its_own_lengths(
    tmp_path: Path, recipe: Callable[..., RunConfig], tailrace_here: Command
) -> None:
    config = recipe()
    assert train(config, resume=False) == 0
    run = Path(config.output_dir)
    assert "Plan against reality" not in words((run / "report.html").read_text())
    path = tmp_path / "machine.json"
    measured_here = msgspec.structs.replace(
        profile(), cores=2, engines=[engine(2, 0.02)], trainers=[trainer(2, 0.002)], model=config.model.path
    )
    path.write_bytes(msgspec.json.encode(measured_here))
    here = foretold_after(run, cluster=None, profile=path, workload=None, model=None)
    measured = [event for event in sampled(run) if event.step]
    assert here.figures.response_tokens == pytest.approx(sum(event.tokens or 0 for event in measured) / len(measured))
    assert here.rests_on == "profiled step times"
    done = tailrace_here("report", str(run), "--cluster", "1xH100")
    assert done.returncode == 0, done.stderr
    assert "under its own lengths on 1 H100, colocated, staleness 0" in words((run / "report.html").read_text())
    assert tailrace_here("report", str(run)).returncode == 0
    assert "Plan against reality" not in words((run / "report.html").read_text())


def sampled(run: Path) -> list[Event]:
    """The samples of a run's training steps."""
    return [event for event in read_events(run / "events.jsonl") if event.task == "sample" and event.step is not None]


def test_of_engines_that_differ_the_mean_one_is_foretold(tmp_path: Path, recipe: Callable[..., RunConfig]) -> None:
    engine = {"type": "native", "kv_cache_gib": 8.0}

    def found(name: str, **wide: int) -> Foretold:
        rollout = {"workers": 1, "pools": {"wide": {"engine": wide}}} if wide else {"workers": 2}
        config = recipe(
            pipeline={"placement": "separated"},
            queue={"type": "service"},
            cluster={"rollout": rollout},
            engine=engine,
            sampling__max_new_tokens=16384,
            trainer__gradient_checkpointing=True,
        )
        run = directory_of(tmp_path / name, config)
        return foretold_after(run, cluster="8xH100", profile=None, workload="math-32b", model="Qwen2.5-1.5B")

    alike, differ = found("alike"), found("differ", tp=4, dp=1)
    quick, slow = (each.decode.step_s(1, 8, 8 * 500, 1) for each in (differ, alike))
    assert quick < slow
    assert [differ.figures.engines, alike.figures.engines] == pytest.approx([2, 2])
    assert differ.memory["rollout"].bytes == alike.memory["rollout"].bytes, "of the engine with the most"
    assert alike.least_s < alike.figures.step_s < alike.most_s


def directory_of(run: Path, config: RunConfig) -> Path:
    """The directory of a run that has ended at once."""
    run.mkdir()
    (run / "events.jsonl").write_bytes(msgspec.json.encode(Event(task="run", actor="driver", start=0, end=0)) + b"\n")
    (run / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    return run


def test_a_simulated_run_is_not_simulated_again(tmp_path: Path) -> None:
    simulated = tmp_path / "simulated"
    simulated.mkdir()
    began = Event(task="run", actor="driver", start=0, end=0, info={"machine": "simulated"})
    (simulated / "events.jsonl").write_bytes(msgspec.json.encode(began) + b"\n")
    with pytest.raises(PlanError, match=r"simulated is of tailrace simulate, and has no recipe to simulate"):
        foretold_after(simulated, cluster="1xH100", profile=None, workload=None, model=None)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"cluster": None, "profile": None, "workload": "math-32b"}, "give --cluster or --profile"),
        ({"cluster": "1xH100", "profile": Path("x.json"), "workload": None}, "and not both"),
        ({"cluster": "1xH10", "profile": None, "workload": "math-32b"}, "did you mean 'H100'"),
        ({"cluster": None, "profile": Path("nowhere.json"), "workload": "math-32b"}, "nowhere.json cannot be read"),
        ({"cluster": "1xH100", "profile": None, "workload": "math-32b"}, "use a model with a longer context"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_one_line(
    tmp_path: Path, recipe: Callable[..., RunConfig], options: dict[str, Any], said: str
) -> None:
    run = directory_of(tmp_path / "run", recipe())
    with pytest.raises(UserError) as refused:
        foretold_after(run, **options, model=None)
    assert said in str(refused.value)
