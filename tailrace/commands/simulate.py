"""`tailrace simulate`: what a recipe would take on devices that need not be there.

The recipe says how many engines there are and of which TP degree (`cluster.rollout.workers`, `engine.tp`,
`engine.dp`); the trainer has all other devices, in the arrangement that is predicted to be the quickest. Lengths are
those of a workload.
"""

import json as json_module
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import tailrace
from tailrace.algorithms.factory import make_algorithm
from tailrace.algorithms.table import Score
from tailrace.commands.allocation_text import engines_text, memory_text, trainer_text
from tailrace.config.cluster import RolloutPoolConfig, pool_key
from tailrace.config.engine import NativeEngineConfig
from tailrace.config.run import RunConfig
from tailrace.config.written import shown
from tailrace.errors import PlanError
from tailrace.events import Event, EventFile
from tailrace.planning.allocation import Allocation, best_layout
from tailrace.planning.hardware.base import Cluster
from tailrace.planning.hardware.clusters import open_cluster
from tailrace.planning.memory import Memory, engine_memory, trainer_memory
from tailrace.planning.model_shape.base import ModelShape
from tailrace.planning.model_shape.catalogue import find_shape
from tailrace.planning.step_times.basis import Basis, Kind
from tailrace.planning.step_times.sources import source_of
from tailrace.planning.step_times.training_setup import Layout, TrainingSetup
from tailrace.registers import run_files
from tailrace.registers.events import EventKind
from tailrace.report.page import write_report
from tailrace.report.text import number, percent
from tailrace.run.directory import RunDirectory
from tailrace.run.step_metrics import TaskTimes
from tailrace.run.worker_metrics import WorkerMetrics
from tailrace.simulator.drawing import draw_steps
from tailrace.simulator.run import SimulatedRun
from tailrace.simulator.scenario import Scenario
from tailrace.simulator.setup import PREFILL_TOKENS, scenario_of, step_batches
from tailrace.simulator.summary import Summary, Summing, binding
from tailrace.workloads.replay import Replay
from tailrace.workloads.samplers.factory import open_workload

WARM_UP = 1
"""Steps that do not count: the first one has nothing that ran ahead of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """The outcome of a simulation."""

    allocation: Allocation
    engine: Memory
    trainer: Memory
    basis: Basis
    """Of the steps of engines."""
    engines: int
    """At the end."""
    summary: Summary


def simulate(
    config: RunConfig, *, cluster: str, workload: str, model: str | None, steps: int, report: Path | None = None
) -> Simulated:
    """Simulate a recipe. `model`: a known name or a directory; by default that of the recipe.

    `report`: the directory of a run that does not exist yet; it gets the events and the report.

    Raises:
        PlanError: the model does not fit, the cluster is too small, a response is too long, or one of the names is not
            known.
        TraceError: there is no such workload.
        UserError: the directory cannot be made.
    """
    machines, shape = open_cluster(cluster), find_shape(model or config.model.path)
    replay = draw_steps(open_workload(workload), config, shape, steps=steps)
    allocation = allocation_of(config, shape, machines, replay)
    source = source_of(shape, allocation.rollout)
    scenario = scenario_of(config, shape, machines, allocation, steps=steps, times=lambda pool: source)
    summing = Summing(min(WARM_UP, steps - 1))
    if report is None:
        run = SimulatedRun(scenario, replay, sinks=(summing,))
        run.run()
    else:
        run = _written(config, scenario, replay, summing, report)
    engine, trainer = memories(config, shape, allocation, scenario, replay)
    return Simulated(
        allocation=allocation,
        engine=engine,
        trainer=trainer,
        basis=source.basis,
        engines=run.present,
        summary=summing.summary(
            preemptions=sum(engine.preemptions for engine in run.engines), graders=config.rewards.least_workers
        ),
    )


def memories(
    config: RunConfig, shape: ModelShape, allocation: Allocation, scenario: Scenario, replay: Replay
) -> tuple[Memory, Memory]:
    """Return what a device of an engine holds, and one of the trainer."""
    kind, setup = scenario.engines[0], TrainingSetup(shape=shape, layout=allocation.layout)
    engine = engine_memory(
        shape,
        tp=allocation.tp,
        cache_tokens=kind.cache_tokens,
        step_tokens=PREFILL_TOKENS,
        batch_size=kind.slots,
    )
    return engine, trainer_memory(setup, step_batches(config, replay).largest)


def allocation_of(config: RunConfig, shape: ModelShape, cluster: Cluster, replay: Replay) -> Allocation:
    """Return the devices that a recipe's engines have, and the arrangement of its trainer on all others.

    Where the cluster has several pools, the first one generates and the last one trains.

    Raises:
        PlanError: the engines leave no device for the trainer, the trainer fits in no arrangement, or the algorithm
            trains another model, too.
    """
    rollout, trainer = cluster.pools[0], cluster.pools[-1]
    tp, dp = _arrangement(config)
    colocated = config.pipeline.placement == "colocated"
    engines = rollout.devices // (tp * dp) if colocated else config.cluster.rollout.total
    most = None if colocated else _most_engines(config.cluster.rollout)
    taken = (most or engines) * tp * dp
    left = trainer.devices - (taken if rollout is trainer and not colocated else 0)
    if not engines:
        raise PlanError(
            f"an engine takes {tp * dp} devices, engine.tp {tp} times engine.dp {dp}, and there are {rollout.devices} "
            f"{rollout.kind}; use fewer for each, or a larger cluster"
        )
    if taken > rollout.devices or left < 1:
        raise PlanError(
            f"{most or engines} engines of {tp * dp} devices take {taken} of {rollout.devices} {rollout.kind}, which "
            f"leaves {max(0, left)} for the trainer; change cluster.rollout.{'max_' if most else ''}workers, engine.tp "
            "or engine.dp"
        )
    layout, _ = best_layout(shape, trainer, left, step_batches(config, replay))
    reference = Layout(tp=tp, dp=engines * dp if colocated else 1) if _has_reference(config) else None
    return Allocation(
        rollout=rollout,
        engines=engines,
        most_engines=most,
        tp=tp,
        dp=dp,
        trainer=trainer,
        layout=layout,
        reference=reference,
        colocated=colocated,
    )


def _arrangement(config: RunConfig) -> tuple[int, int]:
    """TP and DP of each engine.

    Raises:
        PlanError: those of two pools differ.
    """
    (first, found), *others = (
        (name, (engine.tp, engine.dp) if isinstance(engine, NativeEngineConfig) else (1, 1))
        for name, engine in config.engines.items()
    )
    for name, other in others:
        if other != found:
            raise PlanError(
                f"{pool_key(name)} has engines of TP {other[0]} and DP {other[1]}, and {pool_key(first)} of TP "
                f"{found[0]} and DP {found[1]}; a simulation has one arrangement: give all the same engine.tp and dp"
            )
    return found


def _has_reference(config: RunConfig) -> bool:
    """Whether the algorithm scores with the initial weights.

    Raises:
        PlanError: it trains another model beside the policy.
    """
    algorithm = make_algorithm(config.resolved_algorithm)
    for task, _ in algorithm.other_models():
        raise PlanError(
            f"the algorithm's task {task.name!r} trains a model of its own, which is not simulated; simulate the "
            "recipe with algorithm.type=grpo"
        )
    return any(isinstance(task.work, Score) for task in algorithm.tasks)


def _most_engines(config: RolloutPoolConfig) -> int | None:
    """The most engines of all pools, where the run chooses the number of one; else None."""
    if config.elastic is None:
        return None
    pool = config.each[config.elastic]
    return config.total + pool.most - pool.workers


def _written(config: RunConfig, scenario: Scenario, replay: Replay, summing: Summing, report: Path) -> SimulatedRun:
    """Simulate with a file of events, and write the report beside it."""
    directory = RunDirectory(report)
    directory.check_new()
    directory.check_makeable()
    report.mkdir(parents=True)
    file = EventFile(report / run_files.EVENTS)
    try:
        run = SimulatedRun(scenario, replay, sinks=(TaskTimes(), WorkerMetrics(), file, summing))
        info = {
            "config": shown(config.resolved),
            "tailrace": tailrace.__version__,
            "total_steps": scenario.steps,
            "machine": "simulated",
        }
        run.log.emit(Event(task=EventKind.RUN, actor="driver", start=0.0, end=0.0, info=info))
        run.run()
        end = run.agenda.now
        run.log.emit(Event(task=EventKind.END, actor="driver", start=end, end=end, info={"how": "finished"}))
    finally:
        file.close()
    write_report(report)
    return run


def print_simulated(found: Simulated, *, json: bool) -> None:
    """Print the outcome, as a table or as a JSON line."""
    if json:
        print(json_module.dumps(_document(found)))
        return
    allocation, summary = found.allocation, found.summary
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="dim")
    for name, value in (
        ("engines", _engines_text(found)),
        ("trainer", trainer_text(allocation)),
        ("seconds a step", _step_text(found)),
        ("samples a second", number(summary.samples_per_s)),
        ("response tokens a second", f"{number(summary.tokens_per_s)}, {_per_device(found)} a device"),
        ("engines generate", percent(summary.generating)),
        ("trainer trains", _trainer_text(summary)),
        ("graders grade", percent(summary.grading)),
        ("what binds", binding(summary)),
        ("longest response", f"{summary.longest_s:.1f} s"),
        ("staleness", f"{summary.staleness:.2f}"),
        ("memory of an engine's device", memory_text(found.engine)),
        ("memory of a trainer's device", memory_text(found.trainer)),
        ("preempted responses", str(summary.preemptions)),
        ("cost of 1,000 steps", f"{_cost(found):,.0f} USD"),
    ):
        table.add_row(name, value)
    Console(highlight=False).print(table)


def _document(found: Simulated) -> dict[str, Any]:
    allocation = found.allocation
    elastic = {} if allocation.most_engines is None else {"most": allocation.most_engines, "at_the_end": found.engines}
    return {
        "simulated": True,
        "rollout": {**allocation.of_rollout, **elastic, **found.engine.document},
        "trainer": {**allocation.of_trainer, **found.trainer.document},
        "basis": asdict(found.basis),
        "step_interval_s": found.basis.interval(found.summary.step_s),
        **asdict(found.summary),
        "usd_per_1000_steps": _cost(found),
    }


def _step_text(found: Simulated) -> str:
    low, high = found.basis.interval(found.summary.step_s)
    counted = f"the mean of {found.summary.steps}" if found.summary.steps > 1 else "of one"
    return f"{found.summary.step_s:.1f}, {counted}; {low:.0f} to {high:.0f} ({_BASES[found.basis.kind]})"


_BASES: dict[Kind, str] = {
    "analytic": "steps of engines are analytic",
    "profiled": "steps of engines were profiled",
    "kernels": "steps of engines rest on measured kernels",
    "calibrated": "steps of engines are analytic, scaled by measured ones",
}


def _engines_text(found: Simulated) -> str:
    most = found.allocation.most_engines
    changes = "" if most is None else f", {found.engines} engines at the end, of at most {most}"
    return f"{engines_text(found.allocation)}{changes}"


def _trainer_text(summary: Summary) -> str:
    waits = f"waits for samples {percent(summary.waiting_for_samples)}, for weights {percent(summary.weights)}"
    return f"{percent(summary.training)}; {waits}"


def _per_device(found: Simulated) -> str:
    return number(found.summary.tokens_per_s / found.allocation.devices)


def _cost(found: Simulated) -> float:
    """USD of 1,000 steps."""
    return found.allocation.usd_per_hour / 3600 * found.summary.step_s * 1000
