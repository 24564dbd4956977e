"""A candidate simulated: a plan, with its figures."""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

from tailrace.config.run import RunConfig
from tailrace.events import Sink
from tailrace.planner.bound import Bases, Bound
from tailrace.planner.candidates import Candidate, Candidates
from tailrace.planner.modes import Mode
from tailrace.planner.problem import Problem, repeated
from tailrace.planning.allocation import Allocation
from tailrace.planning.memory import Memory
from tailrace.planning.step_times.training import training_basis
from tailrace.simulator.run import SimulatedRun
from tailrace.simulator.scenario import Scenario
from tailrace.simulator.setup import TRANSFER_BASIS, scenario_of
from tailrace.simulator.summary import Summary, Summing
from tailrace.workloads.replay import Replay

Objective = Literal["time", "cost", "energy"]

IDLE = 0.3
"""Power of a device that waits, as a part of that at work: its memory stays on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """An allocation, and what it is predicted to do."""

    candidate: Candidate
    summary: Summary
    bases: Bases
    """What its times rest on."""
    errors: tuple[float, float]
    """By how many times a step may be shorter and longer, since its times are not known better."""
    draws: tuple[float, float]
    """The same, since the lengths of other draws of the workload differ."""
    engine_memories: Mapping[str, Memory]
    """On each device of an engine, by the pool of the recipe."""
    trainer: Memory
    """On each device of the trainer."""
    critic: Memory | None
    """On each device of the critic; None where there is none."""
    critic_pool: str
    """The pool of the recipe that trains it; empty where there is none."""

    @property
    def mode(self) -> Mode:
        """How generation and training overlap."""
        return self.candidate.mode

    @property
    def allocation(self) -> Allocation:
        """Its devices."""
        return self.candidate.allocation

    @property
    def engine(self) -> Memory:
        """On each device of an engine; where there are several kinds, of that with the most."""
        return max(self.engine_memories.values(), key=lambda memory: memory.peak)

    @property
    def bound(self) -> Bound:
        """Its parts by arithmetic."""
        return self.candidate.bound

    @property
    def step_s(self) -> float:
        """Seconds of a training step."""
        return self.summary.step_s

    @property
    def interval_s(self) -> tuple[float, float]:
        """Where the seconds of a mean step are expected to be."""
        shorter, longer = both(self.errors, self.draws)
        return shorter * self.step_s, longer * self.step_s

    @property
    def tokens_per_s_per_device(self) -> float:
        """Response tokens a second, of each device."""
        return self.summary.tokens_per_s / self.allocation.devices

    @property
    def usd_per_1000_steps(self) -> float:
        """Price of 1,000 steps."""
        return self.allocation.usd_per_hour / 3600 * self.step_s * 1000

    @property
    def usd_per_million_tokens(self) -> float:
        """Price of a million response tokens."""
        return self.allocation.usd_per_hour / 3600 / self.summary.tokens_per_s * 1e6

    @property
    def kwh_per_1000_steps(self) -> float:
        """Energy of 1,000 steps; devices that wait draw less."""
        watts = _watts(self.allocation, self.summary.generating, self.summary.training)
        return watts * self.step_s * 1000 / 3.6e6

    def value(self, objective: Objective) -> float:
        """What an objective makes as small as it can."""
        match objective:
            case "time":
                return self.step_s
            case "cost":
                return self.usd_per_1000_steps
            case "energy":
                return self.kwh_per_1000_steps


def _watts(allocation: Allocation, generating: float, training: float) -> float:
    """Power of all devices, where engines and trainer are at work for such parts of the time."""
    if allocation.colocated:
        generating = training = generating + training
    watts = sum(one.devices * one.pool.device.watts for one in allocation.rollout) * _drawn(generating)
    return watts + allocation.trainer_devices * allocation.trainer.device.watts * _drawn(training)


def _drawn(used: float) -> float:
    return IDLE + (1 - IDLE) * min(1.0, used)


def estimate(candidate: Candidate, objective: Objective) -> float:
    """What `Plan.value` would be by the bound alone."""
    allocation, seconds = candidate.allocation, candidate.bound.seconds
    match objective:
        case "time":
            return seconds
        case "cost":
            return allocation.usd_per_hour / 3600 * seconds * 1000
        case "energy":
            bound = candidate.bound
            watts = _watts(allocation, bound.generation_s / seconds, bound.training_s / seconds)
            return watts * seconds * 1000 / 3.6e6


def config_of(config: RunConfig, candidate: Candidate) -> RunConfig:
    """A recipe as a candidate would run it."""
    changed = candidate.mode.applied(config)
    trainer = changed.trainer.model_copy(update={"micro_batch_tokens": candidate.micro_batch_tokens})
    return changed.with_grading_places(candidate.graders).model_copy(update={"trainer": trainer})


def simulate(problem: Problem, candidate: Candidate) -> Plan:
    """Simulate a candidate."""
    summary = summarized(
        partial(scenario_for, problem, candidate),
        problem.drawn,
        groups=problem.config.groups_per_step,
        ahead=candidate.mode.max_staleness,
    )
    return planned(problem, candidate, summary)


def planned(problem: Problem, candidate: Candidate, summary: Summary) -> Plan:
    """The plan of a candidate that was simulated."""
    bases = bases_of(problem, candidate)
    return Plan(
        candidate=candidate,
        summary=summary,
        bases=bases,
        errors=bases.spread(candidate.mode, problem.table, candidate.parts),
        draws=draws_spread(problem, candidate),
        engine_memories=engine_memories(problem, candidate),
        trainer=candidate.trainer,
        critic=candidate.critic,
        critic_pool="" if problem.table.critic is None else problem.table.critic.pool,
    )


def draws_spread(problem: Problem, candidate: Candidate) -> tuple[float, float]:
    """By how many times the mean step of other draws of the workload is shorter and longer, by the bound."""
    of = candidate.mode, candidate.allocation, candidate.micro_batch_tokens, candidate.graders
    others = [Candidates(problem.under(load)).of_allocation(*of) for load in problem.redrawn]
    ratios = [1.0, *(other.bound.seconds / candidate.bound.seconds for other in others)]
    return min(ratios), max(ratios)


def both(*spreads: tuple[float, float]) -> tuple[float, float]:
    """By how many times a step may be shorter and longer for several reasons, which have nothing to do with each
    other."""
    shorter, longer = (math.hypot(*map(math.log, side)) for side in zip(*spreads, strict=True))
    return math.exp(-shorter), math.exp(longer)


def bases_of(problem: Problem, candidate: Candidate) -> Bases:
    """What the times of a candidate rest on; of several kinds of engines, the one that is known least counts."""
    allocation = candidate.allocation
    engines = [problem.source(one).basis for one in allocation.rollout]
    return Bases(
        engines=max(engines, key=lambda basis: basis.error),
        trainer=training_basis(allocation.trainer.kind),
        weights=TRANSFER_BASIS,
    )


def engine_memories(problem: Problem, candidate: Candidate) -> Mapping[str, Memory]:
    """What each device of an engine holds, by the pool of the recipe."""
    return {one.name: one.memory(problem.shape) for one in candidate.allocation.rollout}


def summarized(scenario: Callable[[int], Scenario], drawn: Replay, *, groups: int, ahead: int) -> Summary:
    """Simulate a run whose steps have the drawn lengths, and sum it up; for the arguments see `played`."""
    summing = summing_of(drawn, groups=groups, ahead=ahead)
    run = played(scenario, drawn, (summing,), groups=groups, ahead=ahead, samples=False)
    return summing.summary(preemptions=sum(engine.preemptions for engine in run.engines))


def summing_of(drawn: Replay, *, groups: int, ahead: int) -> Summing:
    """A sink that sums up the steps that count; for the arguments see `played`."""
    return Summing(counted_steps(drawn, groups=groups, ahead=ahead).start)


def counted_steps(drawn: Replay, *, groups: int, ahead: int) -> range:
    """The steps of a simulation that count.

    An asynchronous run begins with an empty pipeline, and its steps take turns in being long. So there are steps before
    those that count, and as many count as make whole turns; engines still have work for others when they end.
    """
    warm_up = ahead + 1 if ahead else 0
    return range(warm_up, warm_up + math.lcm(len(drawn.groups) // groups, ahead + 1))


def played(
    scenario: Callable[[int], Scenario],
    drawn: Replay,
    sinks: tuple[Sink, ...],
    *,
    groups: int,
    ahead: int,
    samples: bool,
) -> SimulatedRun:
    """Simulate a run whose steps have the drawn lengths, up to the last step that counts.

    Args:
        scenario: that of so many steps.
        drawn: the lengths of one or more steps, which are played again and again.
        sinks: take the events.
        groups: of a step.
        ahead: the staleness bound.
        samples: whether there are events of single responses.
    """
    end = counted_steps(drawn, groups=groups, ahead=ahead).stop
    run = SimulatedRun(
        scenario(end + ahead),
        repeated(drawn, (end + ahead) * groups),
        sinks=sinks,
        samples=samples,
        trained=end,
        drawn=drawn,
    )
    run.run()
    return run


def scenario_for(problem: Problem, candidate: Candidate, steps: int) -> Scenario:
    """The scenario of so many steps of a candidate."""
    return scenario_of(
        config_of(problem.config, candidate),
        problem.shape,
        problem.cluster,
        candidate.allocation,
        steps=steps,
        longest=problem.load.batches.longest,
        times=problem.source,
        critic=problem.critic,
        whole_steps=problem.table.whole_steps,
        remaking=problem.table.remaking,
    )


def document(plan: Plan) -> Mapping[str, Any]:
    """The figures of a plan, for machines."""
    allocation, reference = plan.allocation, plan.allocation.reference
    return {
        "mode": plan.mode.values,
        "devices": allocation.devices,
        "rollout": {**plan.candidate.engines.document, "utilisation": plan.summary.generating, **plan.engine.document},
        "trainer": {**allocation.of_trainer, "utilisation": plan.summary.training, **plan.trainer.document},
        "reference_devices": 0 if reference is None else reference.devices,
        **critic_document(plan),
        "micro_batch_tokens": plan.candidate.micro_batch_tokens,
        "graders": plan.candidate.graders,
        "step_s": plan.step_s,
        "interval_s": list(plan.interval_s),
        "bases": asdict(plan.bases),
        "draws": list(plan.draws),
        "bound_s": plan.bound.seconds,
        "binds": plan.bound.binds,
        "samples_per_s": plan.summary.samples_per_s,
        "tokens_per_s_per_device": plan.tokens_per_s_per_device,
        "usd_per_1000_steps": plan.usd_per_1000_steps,
        "usd_per_million_tokens": plan.usd_per_million_tokens,
        "kwh_per_1000_steps": plan.kwh_per_1000_steps,
    }


def critic_document(plan: Plan) -> Mapping[str, Any]:
    """The figures of the critic, for machines; nothing where there is none."""
    layout = plan.allocation.critic
    if layout is None or plan.critic is None:
        return {}
    return {
        "critic": {
            "devices": layout.devices,
            **asdict(layout),
            "utilisation": plan.summary.critic,
            **plan.critic.document,
        }
    }
