"""Plans for one machine: engines, TP, threads and batches, from a profile of it (`tailrace plan --cluster local`).

Every arrangement of engine and trainer that was measured is simulated in every mode with every size of batches. There
are a few hundred at most, and none is left out by a bound.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from tailrace.config.base import GIB
from tailrace.config.load import load_config
from tailrace.config.overrides import merged
from tailrace.config.run import RunConfig
from tailrace.errors import PlanError
from tailrace.planner.modes import Mode, modes_of
from tailrace.planner.problem import Table
from tailrace.planner.recipe import queue_values, without
from tailrace.planner.trial import summarized
from tailrace.planning.model_shape.base import ModelShape
from tailrace.planning.step_times.machine import MachineProfile
from tailrace.simulator.scenario import Scenario
from tailrace.simulator.setup import scenario_here
from tailrace.simulator.summary import Summary
from tailrace.workloads.replay import Replay

_LEAST_SLOTS, _MOST_SLOTS = 4, 128
_LEAST_TOKENS, _MOST_TOKENS = 512, 8192
"""Of a micro-batch."""
_CHOSEN = (
    ("threads",),
    ("engine", "threads_per_rank"),
    ("engine", "adaptive_tp"),
    ("engine", "link"),
    *(("cluster", pool, key) for pool in ("rollout", "trainer") for key in ("workers", "cpus", "threads", "cores")),
    *(("cluster", "rollout", key) for key in ("min_workers", "max_workers", "pools")),
)
"""Keys of a recipe whose values a plan replaces, or leaves to their defaults."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalPlan:
    """A way to run a recipe on this machine, and what it is predicted to do."""

    mode: Mode
    tp: int
    dp: int
    """Replicas of the model in the engine."""
    cores: int
    """Of the engine, and of the trainer; colocated, both have the same."""
    slots: int
    """The most sequences that a replica decodes together."""
    micro_batch_tokens: int
    values: Mapping[str, Any]
    """The recipe."""
    summary: Summary

    @property
    def step_s(self) -> float:
        """Seconds of a training step."""
        return self.summary.step_s


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalProblem:
    """What is planned for."""

    values: Mapping[str, Any]
    """The recipe as it is written."""
    config: RunConfig
    """The same."""
    shape: ModelShape
    profile: MachineProfile
    cores: Sequence[int]
    """Those that were profiled, by number."""
    drawn: Replay
    """The lengths of a few training steps."""
    needed_bytes: Callable[[RunConfig], float]
    """Memory that a recipe takes."""
    memory_bytes: float
    """Memory of this machine."""


def slots_choices(config: RunConfig) -> list[int]:
    """The most sequences that a replica decodes together, to choose from: powers of two, up to a step's responses."""
    return _powers(_LEAST_SLOTS, min(_MOST_SLOTS, config.trainer.train_batch_size))


def micro_batch_choices(config: RunConfig, drawn: Replay) -> list[int]:
    """Sizes of micro-batches to choose from, in tokens: powers of two, up to one that has all of a step."""
    size = config.groups_per_step
    steps = [drawn.groups[first : first + size] for first in range(0, len(drawn.groups), size)]
    whole = max(sum(group[0].prompt_tokens + sum(one.tokens for one in group) for group in step) for step in steps)
    all_of_it = 1 << math.ceil(math.log2(max(whole, _LEAST_TOKENS)))
    return _powers(_LEAST_TOKENS, min(all_of_it, _MOST_TOKENS))


def arrangement_choices(cores: int) -> list[tuple[int, int]]:
    """TP and DP of engines to choose from: one rank, or a few ranks as one or the other."""
    ranks = _powers(2, min(4, cores)) if cores > 1 else []
    return [(1, 1), *((tp, 1) for tp in ranks), *((1, dp) for dp in ranks)]


def _powers(least: int, most: int) -> list[int]:
    """Powers of two from `least`, which is one, to `most`; and `most`."""
    found = [least << power for power in range(64) if least << power < most]
    return [*found, most]


def local_plans(problem: LocalProblem, *, search_modes: bool = False) -> list[LocalPlan]:
    """Return all plans, the best first.

    Args:
        search_modes: whether to choose the mode even where the recipe gives one.

    Raises:
        PlanError: none fits in memory, or see `scenario_of_machine`.
    """
    modes = modes_of(problem.config, search=search_modes)
    if len(modes) > 1 and Table.of(problem.config).critic is not None:
        modes = tuple(mode for mode in modes if mode.colocated)
    plans = [plan for mode in modes for plan in _plans(problem, mode)]
    if not plans:
        needed = problem.needed_bytes(problem.config) / GIB
        raise PlanError(
            f"the recipe takes about {needed:.1f} GiB, and this machine has {problem.memory_bytes / GIB:.1f}; lower "
            "engine.kv_cache_gib, or take a smaller model"
        )
    return sorted(plans, key=lambda plan: plan.step_s)


def _plans(problem: LocalProblem, mode: Mode) -> Iterator[LocalPlan]:
    profile = problem.profile
    cores = profile.cores if mode.colocated else profile.half
    choices = product(
        profile.arrangements(cores), slots_choices(problem.config), micro_batch_choices(problem.config, problem.drawn)
    )
    for (tp, dp), slots, tokens in choices:
        values = _values(problem, mode, tp=tp, dp=dp, slots=slots, tokens=tokens)
        config = load_config(values)
        if problem.needed_bytes(config) > problem.memory_bytes:
            continue
        yield LocalPlan(
            mode=mode,
            tp=tp,
            dp=dp,
            cores=cores,
            slots=slots,
            micro_batch_tokens=tokens,
            values=values,
            summary=_summary(problem, config),
        )


def as_it_is_s(problem: LocalProblem) -> float | None:
    """Seconds of a step of the recipe as it is written; None where such engines and trainers were not measured."""
    try:
        return _summary(problem, problem.config).step_s
    except PlanError:
        return None


def _summary(problem: LocalProblem, config: RunConfig) -> Summary:
    return summarized(
        lambda steps: scenario_of_machine(config, problem.shape, problem.profile, steps=steps),
        problem.drawn,
        groups=config.groups_per_step,
        ahead=config.pipeline.max_staleness,
    )


def scenario_of_machine(config: RunConfig, shape: ModelShape, profile: MachineProfile, *, steps: int) -> Scenario:
    """Return the scenario of a recipe on the machine that was profiled.

    Raises:
        PlanError: it has a critic that was not measured, or see `scenario_here`.
    """
    table = Table.of(config)
    if table.critic is not None and config.pipeline.placement != "colocated":
        raise PlanError(
            "a critic on this machine is simulated with pipeline.placement=colocated alone: profiles have no critic "
            "beside separate workers"
        )
    if table.critic_path not in (None, config.model.path):
        raise PlanError(
            f"the critic begins as {table.critic_path}, and the profile is of {profile.model}; both have to be one "
            "model here: leave out algorithm.critic.path"
        )
    return scenario_here(
        config,
        shape,
        profile,
        steps=steps,
        reference=bool(table.reference) and config.pipeline.placement == "colocated",
        critic=table.critic is not None,
        whole_steps=table.whole_steps,
        remaking=table.remaking,
    )


def _values(problem: LocalProblem, mode: Mode, *, tp: int, dp: int, slots: int, tokens: int) -> dict[str, Any]:
    """The recipe with the keys of a plan."""
    values = dict(problem.values)
    for path in _CHOSEN:
        values = without(values, *path)
    changes: dict[str, Any] = {
        "pipeline": mode.values,
        "engine": {"type": "native", "tp": tp, "dp": dp, "max_batch_size": slots},
        "trainer": {"micro_batch_tokens": tokens},
    }
    if mode.colocated:
        values = without(values, "weights", "mode")
    else:
        half = problem.profile.half
        engine, trainer = problem.cores[:half], problem.cores[half : 2 * half]
        changes["cluster"] = {
            "rollout": {"cores": list(engine), "threads": half, "cpus": float(half)},
            "trainer": {"cores": list(trainer), "threads": half, "cpus": float(half)},
        }
        changes["queue"] = queue_values(problem.config, mode.max_staleness)
    if not mode.streaming:
        values = without(values, "pipeline", "in_order")
    return merged(values, changes)
