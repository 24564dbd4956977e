"""`tailrace simulate`: what a recipe would take on devices that need not be there.

The recipe says which engines there are, and the trainer has all other devices (`planner.given`). Lengths are those of a
workload.
"""

import json as json_module
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import tailrace
from tailrace.commands.allocation_text import engines_text, interval_text, memory_text, trainer_text
from tailrace.config.cluster import ROLLOUT
from tailrace.config.model import ModelConfig
from tailrace.config.run import RunConfig
from tailrace.config.written import shown
from tailrace.errors import PlanError, on_failure
from tailrace.events import Event, EventFile, Sink
from tailrace.planner.candidates import Candidate
from tailrace.planner.given import given, with_allocation
from tailrace.planner.problem import Problem
from tailrace.planner.trial import Plan, counted_steps, critic_document, planned, played, scenario_for, summing_of
from tailrace.planning.hardware.clusters import open_cluster
from tailrace.planning.model_shape.catalogue import find_shape
from tailrace.planning.tp_profile import TPProfile
from tailrace.registers import run_files
from tailrace.registers.events import EventKind
from tailrace.report.page import write_report
from tailrace.report.text import number, percent
from tailrace.run.directory import RunDirectory
from tailrace.run.step_metrics import TaskTimes
from tailrace.run.worker_metrics import WorkerMetrics
from tailrace.simulator.run import SimulatedRun
from tailrace.simulator.summary import Summary, binding
from tailrace.workloads.samplers.factory import open_workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """The outcome of a simulation."""

    plan: Plan
    """The recipe as a plan: of the engines that it begins with."""
    at_the_end: Mapping[str, int]
    """The engines of each pool then. The interval of the plan is that of these."""


def simulate(
    config: RunConfig,
    *,
    cluster: str,
    workload: str,
    model: str | None,
    steps: int,
    profile: Path | None = None,
    report: Path | None = None,
) -> Simulated:
    """Simulate a recipe. `model`: a known name or a directory; by default that of the recipe.

    `steps`: of whose lengths the run is made; see `counted_steps`. `profile`: of `tailrace profile tp`. `report`: the
    directory of a run that does not exist yet; it gets the events and the report.

    Raises:
        ConfigError: the profile cannot be read.
        PlanError: see `planner.given`; or a response is too long, or one of the names is not known.
        TraceError: there is no such workload.
        UserError: the directory cannot be made.
    """
    if report is not None and report.exists():
        raise PlanError(f"--report {report} exists; give a directory that does not, such as {report}-2")
    problem = Problem.of(
        config,
        find_shape(model or config.model.path),
        open_cluster(cluster),
        open_workload(workload),
        steps=steps,
        profile=None if profile is None else TPProfile.read(profile),
    )
    simulation = _Simulation(problem, given(problem))
    return simulation.run() if report is None else simulation.written(report)


class _Simulation:
    """A recipe that is simulated, once."""

    def __init__(self, problem: Problem, candidate: Candidate) -> None:
        self._problem = problem
        self._candidate = candidate
        self._groups = problem.config.groups_per_step
        self._ahead = problem.config.pipeline.max_staleness
        self._summing = summing_of(problem.drawn, groups=self._groups, ahead=self._ahead)

    def run(self) -> Simulated:
        """Simulate without any file."""
        return self._found(self._played())

    def written(self, report: Path) -> Simulated:
        """Simulate with a file of events, and write the report beside it."""
        RunDirectory(report).check_makeable("--report")
        report.mkdir(parents=True)
        with on_failure(shutil.rmtree, report, ignore_errors=True):
            return self._written(report)

    def _written(self, report: Path) -> Simulated:
        counted = counted_steps(self._problem.drawn, groups=self._groups, ahead=self._ahead)
        model = ModelConfig(path=self._problem.shape.name)
        info = {
            "config": shown(self._problem.config.model_copy(update={"model": model}).resolved),
            "tailrace": tailrace.__version__,
            "total_steps": counted.stop,
            "machine": "simulated",
        }
        file = EventFile(report / run_files.EVENTS)
        try:
            file(Event(task=EventKind.RUN, actor="driver", start=0.0, end=0.0, info=info))
            run = self._played(TaskTimes(), WorkerMetrics(), file)
            found, end = self._found(run), run.agenda.now
            ended = {"how": "finished", "simulated": _described(self._problem, found, before=counted.start)}
            run.log.emit(Event(task=EventKind.END, actor="driver", start=end, end=end, info=ended))
        finally:
            file.close()
        write_report(report)
        return found

    def _played(self, *sinks: Sink) -> SimulatedRun:
        scenario = partial(scenario_for, self._problem, self._candidate)
        sinks = (*sinks, self._summing)
        return played(scenario, self._problem.drawn, sinks, groups=self._groups, ahead=self._ahead, samples=True)

    def _found(self, run: SimulatedRun) -> Simulated:
        """The outcome, with the engines that there are at the end."""
        problem, candidate = self._problem, self._candidate
        summary = self._summing.summary(
            preemptions=sum(engine.preemptions for engine in run.engines),
            graders=problem.config.grading_places,
        )
        rollout = tuple(replace(one, engines=run.present[one.name]) for one in candidate.allocation.rollout)
        ended = with_allocation(problem, replace(candidate.allocation, rollout=rollout))
        plan = planned(problem, ended, summary)
        shown = replace(plan, candidate=replace(ended, allocation=candidate.allocation))
        return Simulated(plan=shown, at_the_end=run.present)


def _described(problem: Problem, found: Simulated, *, before: int) -> str:
    """What was simulated, for the head of the report; its means are those that are printed.

    `before`: the steps before those that count.
    """
    plan = found.plan
    engines = " and ".join(map(engines_text, plan.allocation.rollout))
    left_out = {0: "", 1: "; the first step does not count"}.get(before, f"; the first {before} steps do not count")
    return (
        f"{problem.workload} on {engines} that generate and {trainer_text(plan.allocation)} that trains: "
        f"{_step_text(plan)}{left_out}; {plan.usd_per_1000_steps:,.0f} USD for 1,000 steps"
    )


def print_simulated(found: Simulated, *, json: bool) -> None:
    """Print the outcome, as a table or as a JSON line."""
    if json:
        print(json_module.dumps(_document(found)))
        return
    plan, summary = found.plan, found.plan.summary
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="dim")
    for name, value in (
        *_engine_rows(found),
        ("trainer", trainer_text(plan.allocation)),
        *([] if plan.critic is None else [("critic", trainer_text(plan.allocation, critic=True))]),
        ("a step", _step_text(plan)),
        ("samples a second", number(summary.samples_per_s)),
        (
            "response tokens a second",
            f"{number(summary.tokens_per_s)}, {number(plan.tokens_per_s_per_device)} a device",
        ),
        ("engines generate", percent(summary.generating)),
        ("trainer trains", _trainer_text(summary)),
        *([] if plan.critic is None else [("critic computes", percent(summary.critic))]),
        ("graders grade", percent(summary.grading)),
        ("what binds", binding(summary)),
        ("longest response", f"{summary.longest_s:.1f} s"),
        ("staleness", f"{summary.staleness:.2f}"),
        *((f"memory of {_device_of(name)}", memory_text(memory)) for name, memory in plan.engine_memories.items()),
        ("memory of a trainer's device", memory_text(plan.trainer)),
        *([] if plan.critic is None else [("memory of the critic's device", memory_text(plan.critic))]),
        ("preempted responses", str(summary.preemptions)),
        ("cost of 1,000 steps", f"{plan.usd_per_1000_steps:,.0f} USD"),
    ):
        table.add_row(name, value)
    Console(highlight=False).print(table)


def _document(found: Simulated) -> dict[str, Any]:
    plan = found.plan
    return {
        "simulated": True,
        "rollout": [
            {
                "name": one.name,
                **one.document,
                **({} if one.most is None else {"most": one.most, "at_the_end": found.at_the_end[one.name]}),
                **plan.engine_memories[one.name].document,
            }
            for one in plan.allocation.rollout
        ],
        "trainer": {**plan.allocation.of_trainer, **plan.trainer.document},
        **critic_document(plan),
        "bases": asdict(plan.bases),
        "interval_s": list(plan.interval_s),
        "draws": list(plan.draws),
        **{name: value for name, value in asdict(plan.summary).items() if name != "critic"},
        "usd_per_1000_steps": plan.usd_per_1000_steps,
    }


def _step_text(plan: Plan) -> str:
    low, high = plan.interval_s
    counted = f"the mean of {plan.summary.steps}" if plan.summary.steps > 1 else "of one"
    return f"{plan.step_s:.1f} s, {counted}; {low:.1f} to {high:.1f} ({interval_text(plan)})"


def _engine_rows(found: Simulated) -> Iterator[tuple[str, str]]:
    """The engines of each pool of the recipe."""
    for one in found.plan.allocation.rollout:
        changes = (
            "" if one.most is None else f", {found.at_the_end[one.name]} engines at the end, of at most {one.most}"
        )
        yield "engines" if one.name == ROLLOUT else f"engines of {one.name}", f"{engines_text(one)}{changes}"


def _device_of(name: str) -> str:
    return "an engine's device" if name == ROLLOUT else f"a device of {name}"


def _trainer_text(summary: Summary) -> str:
    waits = f"waits for samples {percent(summary.waiting_for_samples)}, for weights {percent(summary.weights)}"
    return f"{percent(summary.training)}; {waits}"
