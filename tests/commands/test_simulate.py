"""Claims on `tailrace simulate`: a recipe on devices that are not there."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tailrace.commands.simulate import simulate as simulated
from tailrace.events import read_events
from tailrace.planner.given import given
from tailrace.planner.trial import simulate as planned
from tailrace.registers.events import EventKind
from tailrace.report.run_data import load_run
from tailrace.report.step_figures import figures_of
from tests.conftest import Command
from tests.planner.problems import problem_of

Simulate = Callable[..., CompletedProcess[str]]

LARGE = (
    "pipeline.placement=separated",
    "pipeline.max_staleness=1",
    "pipeline.streaming=true",
    "trainer.train_batch_size=128",
    "trainer.micro_batch_tokens=8192",
    "sampling.max_new_tokens=16384",
    "cluster.rollout.workers=4",
    "queue.type=service",
    "queue.max_rows=1000",
)


@pytest.fixture
def simulate(tailrace_here: Command) -> Simulate:
    def run(
        *arguments: str,
        model: str = "Qwen2.5-7B",
        cluster: str = "8xH100",
        workload: str = "math-32b",
        recipe: str = "grpo",
    ) -> CompletedProcess[str]:
        given = ("--model", model, "--cluster", cluster, "--workload", workload)
        return tailrace_here("simulate", recipe, *LARGE, *arguments, *given)

    return run


def test_a_recipe_has_the_same_figures_every_time(simulate: Simulate) -> None:
    found = [json.loads(simulate("--json").stdout) for _ in range(2)]
    assert found[0] == found[1]
    assert found[0]["simulated"] is True
    (engines,) = found[0]["rollout"]
    assert engines.items() >= {"kind": "H100", "devices": 4, "engines": 4, "tp": 1, "dp": 1}.items()
    assert found[0]["trainer"]["tp"] * found[0]["trainer"]["pp"] * found[0]["trainer"]["dp"] == 4
    assert 0 < found[0]["generating"] <= 1
    assert found[0]["interval_s"][0] < found[0]["step_s"] < found[0]["interval_s"][1]
    assert found[0]["bases"].keys() == {"engines", "trainer", "weights"}
    assert found[0]["staleness"] <= 1


def test_more_bandwidth_is_not_slower(simulate: Simulate) -> None:
    slower, faster = (json.loads(simulate("--json", cluster=f"8x{kind}").stdout)["step_s"] for kind in ("H100", "H200"))
    assert faster <= slower


def test_its_events_are_those_of_a_run(simulate: Simulate, tmp_path: Path) -> None:
    done = simulate("--steps", "2", "--report", str(tmp_path / "simulated"))
    assert done.returncode == 0
    assert re.search(r"a step +[\d.]+ s, ", done.stdout)
    events = read_events(tmp_path / "simulated" / "events.jsonl")
    assert events[0].info["machine"] == "simulated"
    steps = [event.step for event in events if event.task == EventKind.STEP]
    assert steps == [0, 1, 2, 3], "two before those that count, since the pipeline is empty at first"
    trained = [event for event in events if event.task == EventKind.SAMPLE and event.step in steps]
    assert len(trained) == 4 * 128
    page = (tmp_path / "simulated" / "report.html").read_text()
    for said in (
        "Qwen2.5-7B",
        "math-32b on 4 H100 4×TP1 that generate and 4 H100",
        "the first 2 steps do not count",
    ):
        assert said in page
    again = simulate("--steps", "2", "--report", str(tmp_path / "simulated"))
    assert again.returncode == 2
    assert f"--report {tmp_path / 'simulated'} exists; give a directory that does not" in again.stderr


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_a_plan_and_a_simulation_of_the_same_have_the_same_step(staleness: int) -> None:
    ahead = (f"pipeline.max_staleness={staleness}", "pipeline.streaming=true", "pipeline.placement=separated")
    drawn = problem_of("4xH100", *ahead, "queue.type=service", "cluster.rollout.workers=2", steps=2)
    found = simulated(drawn.config, cluster="4xH100", workload="math-32b", model="Qwen2.5-1.5B", steps=2).plan
    same = replace(drawn, times=None)
    assert found.step_s == pytest.approx(planned(same, given(same)).step_s)


def test_a_run_may_choose_the_number_of_its_engines(simulate: Simulate, tmp_path: Path) -> None:
    elastic = ("cluster.rollout.workers=1", "cluster.rollout.max_workers=4", "--steps", "8")
    found = json.loads(simulate(*elastic, "--json", "--report", str(tmp_path / "simulated")).stdout)
    (engines,) = found["rollout"]
    assert engines["most"] == 4
    assert engines["at_the_end"] > 1
    assert found["draws"][1] < 2, "other draws are costed with the same engines"
    assert found["trainer"]["tp"] * found["trainer"]["pp"] * found["trainer"]["dp"] == 4, "devices are kept for engines"
    scaled = [event for event in read_events(tmp_path / "simulated" / "events.jsonl") if event.task == EventKind.SCALE]
    assert len(scaled[-1].info["engines"]) == engines["at_the_end"]
    assert "Number of engines" in (tmp_path / "simulated" / "report.html").read_text()


def test_pools_may_have_engines_of_several_arrangements(simulate: Simulate, tmp_path: Path) -> None:
    pools = (
        "cluster.rollout.workers=2",
        "cluster.rollout.pools.wide={workers: 1, engine: {tp: 4, max_batch_size: 64}}",
    )
    placed = ("rollout.dispatch.policy=skewness_aware", "rollout.lengths.type=siblings", "--steps", "2")
    cluster = "4xH100+4xH200+4xH800"
    stand = ("cluster.rollout.resources={h100: 1}", "cluster.rollout.pools.wide.resources={h200: 1}")
    report = ("--report", str(tmp_path / "simulated"))
    found = json.loads(simulate(*pools, *placed, *stand, "--json", *report, cluster=cluster).stdout)
    assert [(one["name"], one["kind"], one["engines"], one["tp"]) for one in found["rollout"]] == [
        ("rollout", "H100", 2, 1),
        ("rollout.wide", "H200", 1, 4),
    ]
    assert found["trainer"]["kind"] == "H800"
    assert found["interval_s"][0] < found["step_s"] < found["interval_s"][1]
    samples = [e for e in read_events(tmp_path / "simulated" / "events.jsonl") if e.task == EventKind.SAMPLE]
    assert {event.worker for event in samples} == {"rollout-0", "rollout-1", "rollout.wide-0"}
    told = simulate(*pools, *stand, "--steps", "1", cluster=cluster).stdout
    assert "engines of rollout.wide" in told
    assert "memory of a device of rollout.wide" in told


def test_an_engine_may_change_its_tp_degree(simulate: Simulate, tmp_path: Path) -> None:
    engine = ("cluster.rollout.workers=1", "engine.dp=4", "engine.adaptive_tp.estimate=bound")
    synchronous = ("pipeline.max_staleness=0", "pipeline.streaming=false", "sampling.max_new_tokens=20000")
    static, adaptive = (
        json.loads(simulate("engine.type=native", *synchronous, *options, "--steps", "2", "--json", *report).stdout)
        for options, report in (
            (engine[:2], ()),
            (engine, ("--report", str(tmp_path / "simulated"))),
        )
    )
    assert adaptive["step_s"] < static["step_s"]
    events = read_events(tmp_path / "simulated" / "events.jsonl")
    changes = [event for event in events if event.task == EventKind.ADAPTIVE_TP and "report" in event.info]
    assert changes[0].metrics["source_tp"] == 1
    assert changes[0].metrics["target_tp"] > 1
    assert "Adaptive tensor parallelism" in (tmp_path / "simulated" / "report.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "options", "said"),
    [
        (
            ("cluster.rollout.workers=1", "engine.type=native", "engine.tp=4"),
            {"model": "Qwen2.5-72B"},
            "the trainer of Qwen2.5-72B lacks",
        ),
        (
            ("pipeline.placement=colocated", "queue.type=local", "engine.tp=4", "engine.dp=4"),
            {},
            "an engine takes 16 devices, engine.tp 4 times engine.dp 4, and there are 8 H100",
        ),
        (("cluster.rollout.workers=8",), {}, "8 engines of 1 device take 8 of 8 H100, which leaves 0 for the trainer"),
        (
            ("cluster.rollout.max_workers=8",),
            {},
            "8 engines of 1 device take 8 of 8 H100, which leaves 0 for the trainer; change "
            "cluster.rollout.max_workers",
        ),
        (
            ("cluster.rollout.pools.wide.datacentre=west",),
            {},
            "cluster.rollout.pools.wide asks for the datacentre 'west', and the cluster has H100; change",
        ),
        ((), {"model": "Qwen2.5-Math-7B"}, "the context of Qwen2.5-Math-7B is 4096"),
        (("sampling.max_new_tokens=48",), {}, "sampling.max_new_tokens is 48; raise it"),
        ((), {"workload": "maths-32b"}, "did you mean 'math-32b'"),
        ((), {"cluster": "8xH10"}, "did you mean 'H100'"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    simulate: Simulate, arguments: tuple[str, ...], options: dict[str, str], said: str
) -> None:
    done = simulate(*arguments, **options)
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


OWN = """
from tailrace.algorithms.grpo import Grpo
from tailrace.algorithms.table import TableTask, Train, training_batches
from tailrace.config.algorithm import GrpoConfig


class Ppo(Grpo):
    def __init__(self, group_size):
        super().__init__(GrpoConfig(group_size=group_size))

    @property
    def tasks(self):
        critic = Train(self.loss, lambda config, model_dir: None)
        reads = ("prompt_ids", "response_ids")
        return (*super().tasks, TableTask(name="critic", reads=reads, work=critic, claims=training_batches, pool="own"))
"""


def test_the_events_of_a_critic_are_those_of_a_run(simulate: Simulate, tmp_path: Path) -> None:
    ppo = ("algorithm={type: ppo, group_size: 4}", "pipeline.max_staleness=0", "--report", str(tmp_path / "run"))
    done = simulate(*ppo, "--json", model="Qwen2.5-1.5B")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["critic"]["devices"] + found["trainer"]["devices"] == 4
    assert 0 < found["critic"]["utilisation"] < 1
    run = load_run(tmp_path / "run")
    assert {(event.actor, event.worker) for event in run.of(EventKind.OPTIMIZER)} == {
        ("trainer", "trainer-0"),
        ("critic", "critic"),
    }
    values = [event for event in run.spans if event.task == "values"]
    assert sum(event.samples or 0 for event in values) == 128 * len(run.steps)
    assert {(event.actor, event.worker) for event in values} == {("trainer", "critic")}
    figures = figures_of(run, run.steps)
    assert figures is not None
    assert figures.critic_s == pytest.approx(found["critic"]["utilisation"] * figures.step_s, rel=0.01)
    assert figures.step_s == pytest.approx(found["step_s"], rel=0.01)
    page = (tmp_path / "run" / "report.html").read_text()
    assert "values" in page
    assert "critic" in page


def test_a_model_beside_policy_and_critic_is_refused(
    simulate: Simulate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "simulated_ppo.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    recipe = (
        "{output_dir: run, model: {path: x}, prompts: {source: {type: jsonl, path: x}}, rewards: {grader: {type: "
        "regex, pattern: x}}, algorithm: {type: adapter, path: simulated_ppo.Ppo}}"
    )
    (tmp_path / "recipe.yaml").write_text(recipe)
    done = simulate(recipe="recipe.yaml")
    assert done.returncode == 2
    assert (
        "the algorithm's task 'critic' has a model of its own, which is neither planned for nor simulated"
        in done.stderr
    )


def test_a_report_that_cannot_be_written_is_refused_by_its_option(simulate: Simulate) -> None:
    done = simulate("--report", "/proc/simulated")
    assert done.returncode == 2
    assert "--report /proc/simulated cannot be written: No such file or directory; choose another" in done.stderr


def test_a_report_replaces_no_run(simulate: Simulate, tmp_path: Path) -> None:
    (tmp_path / "simulated").mkdir()
    (tmp_path / "simulated" / "events.jsonl").write_text("")
    done = simulate("--report", str(tmp_path / "simulated"))
    assert done.returncode == 2
    assert "simulated" in done.stderr
