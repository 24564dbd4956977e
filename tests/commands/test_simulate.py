"""Claims on `tailrace simulate`: a recipe on devices that are not there."""

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tailrace.events import read_events
from tailrace.registers.events import EventKind
from tests.conftest import Command

Simulate = Callable[..., CompletedProcess[str]]

LARGE = (
    "pipeline.placement=separated",
    "pipeline.max_staleness=1",
    "pipeline.streaming=true",
    "trainer.train_batch_size=128",
    "trainer.micro_batch_tokens=8192",
    "sampling.max_new_tokens=4096",
    "cluster.rollout.workers=4",
    "queue.type=service",
    "queue.max_rows=1000",
)


@pytest.fixture
def simulate(tailrace_here: Command) -> Simulate:
    def run(
        *arguments: str, model: str = "Qwen2.5-7B", cluster: str = "8xH100", workload: str = "math-32b"
    ) -> CompletedProcess[str]:
        given = ("--model", model, "--cluster", cluster, "--workload", workload)
        return tailrace_here("simulate", "quickstart", *LARGE, *arguments, *given)

    return run


def test_a_recipe_has_the_same_figures_every_time(simulate: Simulate) -> None:
    found = [json.loads(simulate("--json").stdout) for _ in range(2)]
    assert found[0] == found[1]
    assert found[0]["simulated"] is True
    assert found[0]["rollout"] == {"kind": "H100", "engines": 4, "tp": 1, "dp": 1}
    assert found[0]["trainer"]["tp"] * found[0]["trainer"]["pp"] * found[0]["trainer"]["dp"] == 4
    assert 0 < found[0]["generating"] <= 1
    assert found[0]["staleness"] <= 1


def test_more_bandwidth_is_not_slower(simulate: Simulate) -> None:
    slower, faster = (json.loads(simulate("--json", cluster=f"8x{kind}").stdout)["step_s"] for kind in ("H100", "H200"))
    assert faster <= slower


def test_its_events_are_those_of_a_run(simulate: Simulate, tmp_path: Path) -> None:
    done = simulate("--steps", "2", "--report", str(tmp_path / "simulated"))
    assert done.returncode == 0
    assert "seconds a step" in done.stdout
    events = read_events(tmp_path / "simulated" / "events.jsonl")
    assert events[0].info["machine"] == "simulated"
    assert [event.step for event in events if event.task == EventKind.STEP] == [0, 1]
    assert sum(event.task == EventKind.SAMPLE for event in events) == 2 * 128
    assert "simulated" in (tmp_path / "simulated" / "report.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "options", "said"),
    [
        ((), {"model": "Qwen2.5-72B"}, "the trainer of Qwen2.5-72B lacks"),
        (("cluster.rollout.workers=8",), {}, "8 engines of 1 devices take 8 of 8 H100, which leaves 0 for the trainer"),
        ((), {"model": "Qwen2.5-Math-7B"}, "and Qwen2.5-Math-7B takes 4096"),
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


def test_a_report_replaces_no_run(simulate: Simulate, tmp_path: Path) -> None:
    (tmp_path / "simulated").mkdir()
    (tmp_path / "simulated" / "events.jsonl").write_text("")
    done = simulate("--report", str(tmp_path / "simulated"))
    assert done.returncode == 2
    assert "simulated" in done.stderr
