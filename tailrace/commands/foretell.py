"""What a simulation foretells of a run, in the figures that the run will tell of itself.

a plan            --output writes it beside the recipe, which names it: observe.plan
a run afterwards  tailrace report --cluster or --profile simulates the run's own recipe
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean

import msgspec

from tailrace.config.engine import NativeEngineConfig
from tailrace.config.load import load_config
from tailrace.config.run import RunConfig
from tailrace.errors import PlanError, UserError, counted
from tailrace.events import Event
from tailrace.host.whole_file import whole_file
from tailrace.models.resolve import resolve_model
from tailrace.planner.candidates import Candidate
from tailrace.planner.given import given
from tailrace.planner.local import LocalPlan, LocalProblem, scenario_of_machine
from tailrace.planner.problem import Problem
from tailrace.planner.search import Plans
from tailrace.planner.trial import bases_of, both, counted_steps, draws_spread, engine_memories, played, scenario_for
from tailrace.planning.allocation import Allocation
from tailrace.planning.dispatch.costs import StepCosts, fitted
from tailrace.planning.foretold import Foretold, Peak
from tailrace.planning.hardware.base import Cluster
from tailrace.planning.hardware.clusters import open_cluster
from tailrace.planning.memory import Memory
from tailrace.planning.model_shape.base import ModelShape
from tailrace.planning.model_shape.catalogue import find_shape
from tailrace.planning.model_shape.hugging_face import read_shape
from tailrace.planning.step_times.basis import DRIFT, Basis, Kind
from tailrace.planning.step_times.machine import MachineProfile, read_machine_profile
from tailrace.planning.step_times.trainer_profile import ProfiledTrainer
from tailrace.report.run_data import RunData, load_run, step_of
from tailrace.report.step_figures import figures_of
from tailrace.run.directory import RunDirectory
from tailrace.simulator.drawing import draw_steps
from tailrace.simulator.scenario import EngineKind, Scenario
from tailrace.workloads.replay import Replay
from tailrace.workloads.run_trace import trace_of_events
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
    kind: Kind
    """What the engines' steps rest on."""
    spread: tuple[float, float]
    """By how many times a step may be shorter and longer."""
    memory: Mapping[str, Memory]
    trainer_devices: int = 1


def foretold_by(plans: Plans) -> Foretold:
    """What the best plan foretells."""
    return foretell(_played(plans.problem, plans.best.candidate))


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
    run = load_run(run_dir)
    if run.info.get("machine") == "simulated":
        raise PlanError(
            f"{run_dir} is of tailrace simulate, and has no recipe to simulate; give the directory of a run"
        )
    config = load_config(RunDirectory(run_dir).config)
    shape = shape_here(config) if model is None else find_shape(model)
    asked = None if workload is None else open_workload(workload)
    drawn = _own(run, config) if asked is None else draw_steps(asked, config, shape, steps=_DRAWN)
    if isinstance(machines, Cluster):
        problem = Problem(
            config=config, shape=shape, cluster=machines, workload=workload or "its own lengths", drawn=drawn
        )
        return foretell(_played(problem, given(problem)))
    if not isinstance(config.engine, NativeEngineConfig):
        raise PlanError(f"engine.type of the run is {config.engine.type!r}; only native engines have profiles")
    return foretell(_here(config, shape, machines, drawn))


def write_foretold(path: Path, foretold: Foretold) -> None:
    """Write what was foretold; see `planning.foretold`."""
    with whole_file(path) as partial_path:
        partial_path.write_bytes(msgspec.json.format(msgspec.json.encode(foretold)) + b"\n")


def shape_here(config: RunConfig) -> ModelShape:
    """That of the run's model, which has a readable name in the recipe."""
    return replace(read_shape(resolve_model(config.model)), name=config.model.path)


def _own(run: RunData, config: RunConfig) -> Replay:
    """The lengths of the run's last steps that are whole."""
    replay = Replay.of(trace_of_events(run.name, run.events))
    groups, size = config.groups_per_step, config.algorithm.group_size
    whole = [group for group in replay.groups if len(group) == size]
    made = len(whole) // groups
    steps = min(_STEPS, made - 1 if made > 1 else made)  # the first one counts neither here nor there
    if not steps:
        raise UserError(f"{run.name} has no step of {groups} groups of {size} samples to simulate; give --workload")
    return Replay(whole[-steps * groups :])


def _here(config: RunConfig, shape: ModelShape, profile: MachineProfile, drawn: Replay) -> Simulation:
    cores = profile.cores if config.pipeline.placement == "colocated" else profile.half
    basis = Basis(kind="profiled", error=DRIFT + ProfiledTrainer(profile.trainer(cores)).error)
    return Simulation(
        of=f"{shape.name} on {counted(cores, 'core')}{'' if cores == profile.cores else ' each'} of this machine",
        scenario=lambda steps: scenario_of_machine(config, shape, profile, steps=steps),
        drawn=drawn,
        config=config,
        kind=basis.kind,
        spread=basis.interval(1.0),
        memory={},
    )


def _played(problem: Problem, candidate: Candidate) -> Simulation:
    """The simulation of a candidate."""
    bases = bases_of(problem, candidate)
    engines = engine_memories(problem, candidate).values()
    return Simulation(
        of=f"{problem.shape.name} under {problem.workload} on {_devices(candidate.allocation)}, {candidate.mode}",
        scenario=partial(scenario_for, problem, candidate),
        drawn=problem.drawn,
        config=candidate.mode.applied(problem.config),
        kind=bases.engines.kind,
        spread=both(bases.spread(candidate.mode, problem.table, candidate.parts), draws_spread(problem, candidate)),
        memory={
            "rollout": max(engines, key=lambda memory: memory.peak),
            "trainer": candidate.trainer,
            **({} if candidate.critic is None else {"critic": candidate.critic}),
        },
        trainer_devices=candidate.allocation.layout.devices,
    )


def _devices(allocation: Allocation) -> str:
    """The devices by their kinds."""
    counts = Counter({one.pool.kind: 0 for one in allocation.rollout})
    for one in allocation.rollout:
        counts[one.pool.kind] += one.devices
    counts[allocation.trainer.kind] += allocation.trainer_devices
    return " and ".join(f"{number} {kind}" for kind, number in counts.items())


def foretell(made: Simulation) -> Foretold:
    """Simulate, and return the figures that the simulated run tells of itself."""
    events: list[Event] = []
    groups, ahead = made.config.groups_per_step, made.config.pipeline.max_staleness
    played(made.scenario, made.drawn, (events.append,), groups=groups, ahead=ahead, samples=True)
    run = RunData(name="simulated", events=events, last_event_at=datetime.now(UTC))
    numbers = counted_steps(made.drawn, groups=groups, ahead=ahead)
    figures = figures_of(run, [step for step in run.steps if step_of(step) in numbers])
    assert figures is not None, "simulated runs tell all"
    shorter, longer = made.spread
    kinds = made.scenario(1).engines
    return Foretold(
        of=made.of,
        rests_on=f"{made.kind} step times",
        least_s=shorter * figures.step_s,
        most_s=longer * figures.step_s,
        figures=figures,
        decode=_costs(kinds, made.drawn),
        replicas=round(fmean(kind.dp for kind in kinds)),
        memory={kind: Peak(bytes=memory.peak, instant=memory.worst) for kind, memory in made.memory.items()},
        trainer_devices=made.trainer_devices,
    )


def _costs(kinds: Sequence[EngineKind], drawn: Replay) -> StepCosts:
    """The step times as a line; of engines that differ, the mean one."""
    lines = {name: _line(kind, drawn) for name, kind in {kind.name: kind for kind in kinds}.items()}
    each = [msgspec.structs.asdict(lines[kind.name]) for kind in kinds]
    return StepCosts(**{name: fmean(costs[name] for costs in each) for name in StepCosts.__struct_fields__})


def _line(kind: EngineKind, drawn: Replay) -> StepCosts:
    """The step times as a line, through batches of all sizes with contexts as the workload has them."""
    scripts = [script for group in drawn.groups for script in group]
    shortest = min(script.prompt_tokens for script in scripts)
    longest = max(script.prompt_tokens + script.tokens for script in scripts)
    sizes = sorted({kind.slots, *(1 << power for power in range(kind.slots.bit_length()))})
    decode = [
        (float(size), float(size * context), kind.times.step_s(kind.tp, size, size * context, kind.dp))
        for size, context in product(sizes, (shortest, (shortest + longest) / 2, longest))
    ]
    return fitted(decode, [(float(_PREFILL), kind.times.prefill_s(kind.tp, 1, _PREFILL))])
