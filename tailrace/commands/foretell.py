"""What a simulation foretells of a run, in the figures that the run will tell of itself.

a plan            --output writes it beside the recipe, which names it: observe.plan
a run afterwards  tailrace report --cluster or --profile simulates the run's own recipe
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from itertools import product
from pathlib import Path

import msgspec

from tailrace.commands.simulate import allocation_of, memories
from tailrace.config.engine import NativeEngineConfig
from tailrace.config.load import load_config
from tailrace.config.run import RunConfig
from tailrace.errors import PlanError, UserError
from tailrace.events import Event
from tailrace.models.resolve import resolve_model
from tailrace.planner.local import LocalPlan, LocalProblem
from tailrace.planner.search import Plans
from tailrace.planner.trial import counted_steps, played, scenario_for
from tailrace.planning.allocation import Allocation
from tailrace.planning.dispatch.costs import StepCosts, fitted
from tailrace.planning.foretold import Foretold, Peak
from tailrace.planning.hardware.base import Cluster
from tailrace.planning.hardware.clusters import open_cluster
from tailrace.planning.latency import StepTimes
from tailrace.planning.memory import Memory
from tailrace.planning.model_shape.base import ModelShape
from tailrace.planning.model_shape.catalogue import find_shape
from tailrace.planning.model_shape.hugging_face import read_shape
from tailrace.planning.step_times.basis import Basis
from tailrace.planning.step_times.machine import MachineProfile, read_machine_profile
from tailrace.planning.step_times.profiled import DRIFT
from tailrace.planning.step_times.sources import source_of
from tailrace.planning.step_times.trainer_profile import ProfiledTrainer
from tailrace.report.run_data import RunData, load_run, step_of
from tailrace.report.step_figures import figures_of
from tailrace.report.text import counted
from tailrace.run.directory import RunDirectory
from tailrace.simulator.drawing import draw_steps
from tailrace.simulator.scenario import Scenario
from tailrace.simulator.setup import scenario_here, scenario_of, slots_of
from tailrace.workloads.replay import Replay
from tailrace.workloads.run_trace import run_provenance, trace_of_events
from tailrace.workloads.samplers.factory import open_workload

_STEPS = 16
"""Steps that are simulated of a run afterwards: the last ones, at most."""
_DRAWN = 4
"""Steps that are drawn of a workload for that."""
_PREFILL = 4096
"""Tokens of a prompt by which the seconds of one token are told."""


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """A simulation, and what it rests on."""

    of: str
    scenario: Callable[[int], Scenario]
    """That of so many steps."""
    drawn: Replay
    config: RunConfig
    basis: Basis
    spread: tuple[float, float] | None = None
    """By how many times a step may be shorter and longer; by default as the engines' steps."""
    times: StepTimes
    tp: int = 1
    dp: int = 1
    slots: int
    memory: Mapping[str, Memory]


def foretold_by(plans: Plans) -> Foretold:
    """What the best plan foretells."""
    problem, best = plans.problem, plans.best
    allocation = best.allocation
    return foretell(
        Simulation(
            of=f"{problem.shape.name} under {problem.workload} on {_devices(allocation)}, {best.mode}",
            scenario=partial(scenario_for, problem, best.candidate),
            drawn=problem.drawn,
            config=best.mode.applied(problem.config),
            basis=best.bases.engines,
            spread=best.spread,
            times=problem.source(allocation.rollout),
            tp=allocation.tp,
            dp=allocation.dp,
            slots=slots_of(problem.config),
            memory={"rollout": best.engine, "trainer": best.trainer},
        )
    )


def foretold_here(problem: LocalProblem, plan: LocalPlan) -> Foretold:
    """What a plan for this machine foretells."""
    return foretell(_here(load_config(plan.values), problem.shape, problem.profile, problem.drawn))


def foretold_after(
    run_dir: Path, *, cluster: str | None, profile: Path | None, workload: str | None, model: str | None
) -> Foretold:
    """What a simulation of a run's recipe says of it: on a cluster, or on the machine of a profile.

    `workload`: by default the lengths are those of the run's own last steps, so that only the times can be wrong.

    Raises:
        PlanError: neither or both are given, the recipe fits nowhere, a sample is too long, or one of the names is not
            known.
        ModelError: `model` is not given, and the run's is not here.
        UserError: it is not the directory of a run, or no step of it has ended.
    """
    machines: Cluster | MachineProfile
    if cluster is not None and profile is None:
        machines = open_cluster(cluster)
    elif profile is not None and cluster is None:
        machines = read_machine_profile(profile)
    else:
        raise PlanError("give --cluster or --profile, and not both: what the run is simulated on")
    run, config = load_run(run_dir), load_config(RunDirectory(run_dir).config)
    shape = shape_here(config) if model is None else find_shape(model)
    asked = None if workload is None else open_workload(workload)
    drawn = _own(run, config) if asked is None else draw_steps(asked, config, shape, steps=_DRAWN)
    if isinstance(machines, Cluster):
        return foretell(_on(machines, config, shape, drawn, workload or "its own lengths"))
    if not isinstance(config.engine, NativeEngineConfig):
        raise PlanError(f"engine.type of the run is {config.engine.type!r}; only native engines have profiles")
    return foretell(_here(config, shape, machines, drawn))


def write_foretold(path: Path, foretold: Foretold) -> None:
    """Write what was foretold; see `planning.foretold`."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(foretold)) + b"\n")


def shape_here(config: RunConfig) -> ModelShape:
    """That of the run's model, which has a readable name in the recipe."""
    return replace(read_shape(resolve_model(config.model)), name=config.model.path)


def _own(run: RunData, config: RunConfig) -> Replay:
    """The lengths of the run's last steps that are whole."""
    replay = Replay.of(trace_of_events(run.events, run_provenance(run.name, run.info)))
    groups, size = config.groups_per_step, config.algorithm.group_size
    whole = [group for group in replay.groups if len(group) == size]
    made = len(whole) // groups
    steps = min(_STEPS, made - 1 if made > 1 else made)  # the first one counts neither here nor there
    if not steps:
        raise UserError(f"{run.name} has no step of {groups} groups of {size} samples to simulate; give --workload")
    return Replay(whole[-steps * groups :])


def _here(config: RunConfig, shape: ModelShape, profile: MachineProfile, drawn: Replay) -> Simulation:
    engine = config.engine
    assert isinstance(engine, NativeEngineConfig), "others are refused before"
    cores = profile.cores if config.pipeline.placement == "colocated" else profile.half
    return Simulation(
        of=f"{shape.name} on {counted(cores, 'core')}{'' if cores == profile.cores else ' each'} of this machine",
        scenario=lambda steps: scenario_here(config, shape, profile, steps=steps),
        drawn=drawn,
        config=config,
        basis=Basis(kind="profiled", error=DRIFT + ProfiledTrainer(profile.trainer(cores)).error),
        times=profile.engine(cores, tp=engine.tp, dp=engine.dp).costs,
        tp=engine.tp,
        dp=engine.dp,
        slots=engine.max_batch_size,
        memory={},
    )


def _on(machines: Cluster, config: RunConfig, shape: ModelShape, drawn: Replay, workload: str) -> Simulation:
    allocation = allocation_of(config, shape, machines, drawn)
    source, slots = source_of(shape, allocation.rollout, allocation.tp), slots_of(config)

    def scenario(steps: int) -> Scenario:
        return scenario_of(config, shape, machines, allocation, steps=steps, times=lambda pool: source)

    engine, trainer = memories(config, shape, allocation, scenario(1), drawn)
    return Simulation(
        of=f"{shape.name} under {workload} on {_devices(allocation)}",
        scenario=scenario,
        drawn=drawn,
        config=config,
        basis=source.basis,
        times=source,
        tp=allocation.tp,
        dp=allocation.dp,
        slots=slots,
        memory={"rollout": engine, "trainer": trainer},
    )


def _devices(allocation: Allocation) -> str:
    rollout, trainer = allocation.rollout, allocation.trainer
    if rollout is trainer:
        return f"{allocation.devices} {rollout.kind}"
    return f"{allocation.rollout_devices} {rollout.kind} and {allocation.trainer_devices} {trainer.kind}"


def foretell(made: Simulation) -> Foretold:
    """Simulate, and return the figures that the simulated run tells of itself."""
    events: list[Event] = []
    groups, ahead = made.config.groups_per_step, made.config.pipeline.max_staleness
    played(made.scenario, made.drawn, events.append, groups=groups, ahead=ahead, samples=True)
    run = RunData(name="simulated", events=events, last_event_at=datetime.now(UTC))
    numbers = counted_steps(made.drawn, groups=groups, ahead=ahead)
    figures = figures_of(run, [step for step in run.steps if step_of(step) in numbers])
    assert figures is not None, "simulated runs tell all"
    shorter, longer = made.spread or made.basis.interval(1.0)
    return Foretold(
        of=made.of,
        rests_on=f"{made.basis.kind} step times",
        least_s=shorter * figures.step_s,
        most_s=longer * figures.step_s,
        figures=figures,
        decode=_costs(made),
        replicas=made.dp,
        memory={kind: Peak(bytes=memory.peak, instant=memory.worst) for kind, memory in made.memory.items()},
    )


def _costs(made: Simulation) -> StepCosts:
    """The step times as a line, through batches of all sizes with contexts as the workload has them."""
    scripts = [script for group in made.drawn.groups for script in group]
    shortest = min(script.prompt_tokens for script in scripts)
    longest = max(script.prompt_tokens + script.tokens for script in scripts)
    sizes = sorted({made.slots, *(1 << power for power in range(made.slots.bit_length()))})
    decode = [
        (float(size), float(size * context), made.times.step_s(made.tp, size, size * context, made.dp))
        for size, context in product(sizes, (shortest, (shortest + longest) / 2, longest))
    ]
    return fitted(decode, [(float(_PREFILL), made.times.prefill_s(made.tp, 1, _PREFILL))])
