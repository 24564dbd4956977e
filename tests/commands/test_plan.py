"""Claims on `tailrace plan`."""

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from xml.etree import ElementTree

import pytest
import yaml

from tests.conftest import Command

PlanCommand = Callable[..., CompletedProcess[str]]


@pytest.fixture
def plan(tailrace_here: Command) -> PlanCommand:
    def run(
        *arguments: str, model: str = "Qwen2.5-7B", cluster: str = "8xH100", workload: str = "math-32b"
    ) -> CompletedProcess[str]:
        given = ("--model", model, "--cluster", cluster, "--workload", workload, "--steps", "1", "--candidates", "4")
        return tailrace_here("plan", "grpo", "sampling.max_new_tokens=16384", *arguments, *given)

    return run


def test_a_plan_says_which_devices_generate_and_which_train_and_what_it_costs(plan: PlanCommand) -> None:
    done = plan("--what-if", "pipeline.max_staleness=1", "--what-if", "cluster=8xH200")
    assert done.returncode == 0
    for said in (
        "The best by time, of 4 that were simulated and",
        "micro-batch",
        "faster by",
        "more H100 for generation",
        "networks twice as fast",
        "USD for 1,000 steps",
    ):
        assert said in done.stdout
    assert "cluster=8xH200" in done.stdout.partition("What if, with the devices and the arrangement of this plan:")[2]
    assert not done.stderr  # it is no terminal


def test_how_much_other_draws_change_a_step_stands_below_what_draws_anew(plan: PlanCommand) -> None:
    done = plan("trainer.train_batch_size=16", "--what-if", "seed=1")
    (interval,) = (line for line in done.stdout.splitlines() if line.startswith("  a step "))
    spread = interval.partition("other draws ")[2].rstrip(")")
    assert spread
    assert f"That alone changes a step by {spread}." in done.stdout.partition("What if")[2]


def test_what_fits_nowhere_is_told_beside_the_plan(plan: PlanCommand) -> None:
    done = plan("--what-if", "model=Qwen2.5-72B", "--what-if", "model.path=Qwen/Qwen2.5-72B")
    assert done.returncode == 0
    assert "The best by time" in done.stdout
    assert "model=Qwen2.5-72B fits nowhere: the trainer of Qwen2.5-72B lacks" in done.stdout
    assert "model.path=Qwen/Qwen2.5-72B fits nowhere" in done.stdout


def test_a_key_of_separate_workers_can_be_asked_where_the_plan_chooses_the_placement(plan: PlanCommand) -> None:
    changes = ("weights.mode=synchronous", "weights={mode: synchronous}", "seed=0")
    done = plan("--json", *(part for change in changes for part in ("--what-if", change)))
    assert done.returncode == 0, done.stderr
    by_key, by_section, seed = json.loads(done.stdout)["what_if"]
    assert not by_key["searched"]
    assert by_key["faster"] < 0  # by default weights are taken in while responses are made
    assert by_section["step_s"] == by_key["step_s"]
    assert seed["faster"] == 0


def test_the_figures_are_there_for_machines(plan: PlanCommand) -> None:
    found = json.loads(plan("--json", "--objective", "cost", "--what-if", "workload=video-7b").stdout)
    assert found["simulated"] is True
    assert len(found["plans"]) == 4
    best = found["plans"][0]
    assert best["usd_per_1000_steps"] == min(each["usd_per_1000_steps"] for each in found["plans"])
    assert best["interval_s"][0] < best["step_s"] < best["interval_s"][1]
    assert best["rollout"]["peak_bytes"] < 80 * 2**30
    assert best["bases"].keys() == {"engines", "trainer", "weights"}
    assert {"change", "step_s", "usd_per_1000_steps", "searched"} <= found["what_if"][0].keys()
    assert found["front"]
    assert found["gains"]


def test_a_recipe_and_a_picture_are_written_and_replaced_only_where_asked(plan: PlanCommand, tmp_path: Path) -> None:
    recipe, picture = tmp_path / "plan.yaml", tmp_path / "front.svg"
    files = ("--output", str(recipe), "--picture", str(picture))
    assert plan(*files, "--search-modes").returncode == 0
    assert "pipeline" in yaml.safe_load(recipe.read_text())
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")
    again = plan(*files)
    assert again.returncode == 2
    assert "exists" in again.stderr
    assert plan(*files, "--force").returncode == 0


@pytest.mark.parametrize(
    ("arguments", "options", "said"),
    [
        (("--objective", "tme"), {}, "--objective is 'tme'; expected time, cost, energy"),
        (("--what-if", "cluster=8xH10"), {}, "did you mean 'H100'"),
        (("--what-if", "pipeline.staleness=1"), {}, "--what-if 'pipeline.staleness=1': grpo: unknown key"),
        (("--output", "/proc/plan.yaml"), {}, "--output /proc/plan.yaml cannot be made: No such file or directory"),
        (("--picture", "/proc/plan.svg"), {}, "--picture /proc/plan.svg cannot be made: No such file or directory"),
        (("--what-if", "engine.tp=8"), {}, "'engine.tp=8': a plan chooses engine.tp itself"),
        (("--what-if", "cluster.rollout.workers=8"), {}, "a plan chooses cluster.rollout itself"),
        (("--what-if", "engine={tp: 8}"), {}, "a plan chooses engine.tp itself"),
        (("--what-if", "pipeline={staleness: 1}"), {}, "staleness"),
        (("--picture", "front.png"), {}, "--picture front.png is written as SVG; give it a name that ends in .svg"),
        (("--output", "same.svg", "--picture", "same.svg"), {}, "--output same.svg write the same file"),
        (("--what-if", "cluster"), {}, "--what-if 'cluster' has no key and value; give KEY=VALUE"),
        (("--what-if", "model="), {}, "--what-if 'model=' has no key and value"),
        ((), {"model": "Qwen2.5-72B"}, "the smallest cluster of H100 that would do is"),
        ((), {"workload": "maths-32b"}, "did you mean 'math-32b'"),
        ((), {"model": "~nosuch/m"}, "the model '~nosuch/m' begins with a user who is not known here"),
        ((), {"workload": "~nosuch/w.yaml"}, "the workload '~nosuch/w.yaml' begins with a user"),
        ((), {"cluster": "~nosuch/c.yaml"}, "the cluster file '~nosuch/c.yaml' begins with a user"),
        (("--output", "."), {}, "--output . is a directory; give a file"),
        (
            ("sampling.max_new_tokens=48",),
            {},
            "is 48; raise it, such as sampling.max_new_tokens=",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    plan: PlanCommand, arguments: tuple[str, ...], options: dict[str, str], said: str
) -> None:
    done = plan(*arguments, **options)
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
