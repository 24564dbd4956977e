"""`tailrace plan`: which devices generate and which train, before any of them is paid for."""

import json as json_module
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tailrace.commands.allocation_text import draws_text, engines_text, interval_text, memory_text, trainer_text
from tailrace.commands.files import check_new_file
from tailrace.commands.foretell import foretold_by
from tailrace.commands.planned_files import check_new_plan, naming_foretold, plan_files, write_plan, write_text
from tailrace.commands.waiting import Tell, waiting
from tailrace.config.base import GIB
from tailrace.config.load import changed_recipe, load_for_cluster
from tailrace.config.overrides import leaves, override_values
from tailrace.config.run import RunConfig
from tailrace.errors import PlanError, UserError, counted, did_you_mean
from tailrace.planner.modes import USUAL, modes_of
from tailrace.planner.problem import Problem
from tailrace.planner.processes import Simulate, Trial, side_by_side
from tailrace.planner.recipe import recipe_text
from tailrace.planner.search import Plans
from tailrace.planner.search import plan as search
from tailrace.planner.trial import Objective, Plan, document
from tailrace.planner.what_if import Comparison, what_if
from tailrace.planning.allocation import USED, Allocation
from tailrace.planning.hardware.clusters import open_cluster
from tailrace.planning.model_shape.catalogue import find_shape, model_path
from tailrace.planning.tp_profile import TPProfile
from tailrace.report.front import Point, front_svg
from tailrace.report.text import number, percent
from tailrace.workloads.samplers.factory import open_workload

OBJECTIVES: tuple[Objective, ...] = ("time", "cost", "energy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The arguments of the command."""

    recipe: Path
    overrides: Sequence[str]
    cluster: str
    workload: str | None
    model: str | None
    steps: int | None
    profile: Path | None = None

    def problem(self, changes: Sequence[str] = ()) -> Problem:
        """What is planned for, with `cluster`, `workload`, `model` or keys of the recipe changed.

        Raises:
            UserError: a name is not known, a key is not valid, or what is asked for does not go together.
        """
        own = dict(option for option in map(_own, changes) if option is not None)
        return Problem.of(
            self._config([change for change in changes if _own(change) is None]),
            find_shape(own.get("model") or self.model or self._config([]).model.path),
            open_cluster(own.get("cluster", self.cluster)),
            open_workload(own.get("workload") or self._workload),
            steps=self.steps,
            profile=None if self.profile is None else TPProfile.read(self.profile),
        )

    def _config(self, changes: Sequence[str]) -> RunConfig:
        """The recipe. Changes that need separate workers are valid where it leaves the placement to the plan."""
        asked = load_for_cluster(self.recipe, self.overrides)
        if not changes or modes_of(asked, search=False) != USUAL:
            return load_for_cluster(self.recipe, [*self.overrides, *changes])
        both = load_for_cluster(self.recipe, [*self.overrides, *_SEPARATED, *changes])
        given = {section for change in changes for section in override_values(change)}
        left = {key: getattr(asked, key) for key in ("pipeline", "queue") if key not in given}
        return both.model_copy(update=left)

    @property
    def _workload(self) -> str:
        if self.workload is None:
            raise PlanError("no workload is given; give --workload, such as math-32b: tailrace trace workloads lists")
        return self.workload


_NOISE = 0.02
"""Gains below this say nothing: another order of the same lengths does as much."""
_WIDTH = 150
"""Columns of the tables at least; a terminal that is narrower breaks their lines."""
_SEPARATED = ("pipeline.placement=separated", "queue.type=service")
_OWN = ("cluster", "workload", "model")
"""Options that --what-if changes, too. As keys of a recipe, two of these are sections, which have keys of their own.
The key `model.path` is the option `model`."""


_DECIDED = (
    *(f"engine.{key}" for key in ("tp", "dp", "kv_cache_gib", "prefill_tokens", "adaptive_tp", "link")),
    *(f"cluster.{pool}" for pool in ("rollout", "trainer", "reference", "pools.critic")),
    *("trainer.backend", "trainer.gradient_checkpointing", "device", "threads"),
)
"""Keys of a recipe that are of a plan's arrangement, which stays in a comparison."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """How is searched."""

    objective: Objective
    candidates: int | None
    modes: bool
    """Whether the mode is searched even where the recipe gives one."""

    def plans(self, problem: Problem, simulate: Simulate) -> Plans:
        """Search for the best plans of a problem.

        Raises:
            PlanError: nothing fits.
        """
        return search(
            problem,
            objective=self.objective,
            candidates=self.candidates,
            search_modes=self.modes,
            simulate=simulate,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """The files that are asked for."""

    output: Path | None
    picture: Path | None
    force: bool

    def check(self) -> None:
        """Check that each can be written.

        Raises:
            UserError: one cannot.
        """
        output, picture = self.output, self.picture
        if output is not None:
            check_new_plan(output, force=self.force)
        if picture is None:
            return
        if picture.suffix != ".svg":
            raise PlanError(f"--picture {picture} is written as SVG; give it a name that ends in .svg")
        check_new_file("--picture", picture, force=self.force)
        if output is not None and picture.resolve() in [path.resolve() for path in plan_files(output)]:
            raise PlanError(f"--picture {picture} and --output {output} write the same file; give each its own")


def plan(asked: Asked, how: Search, files: Files, *, changes: Sequence[str], json: bool) -> None:
    """Plan, print, and write what was asked for.

    Raises:
        UserError: the arguments are not valid, a file is there already, or nothing fits.
    """
    files.check()
    with waiting() as tell:
        tell("drawing the lengths of a few training steps")
        problem = asked.problem()
        others = [(change, _changed(asked, change)) for change in changes]
        with side_by_side(problem) as simulate:
            anew = partial(how.plans, simulate=_told(simulate, tell))
            plans = anew(problem)
            compared = [what_if(plans.best, other, change, _given(change), anew) for change, other in others]
    if json:
        print(json_module.dumps(_document(plans, compared)))
    else:
        _print(plans, compared)
    if files.output is not None:
        write_plan(files.output, _recipe(asked, plans, files.output), foretold_by(plans))
    if files.picture is not None:
        write_text(files.picture, _picture(plans))


def objective_of(text: str) -> Objective:
    """Return the objective of a name.

    Raises:
        PlanError: there is none.
    """
    for objective in OBJECTIVES:
        if text == objective:
            return objective
    raise PlanError(f"--objective is {text!r}; expected {', '.join(OBJECTIVES)}{did_you_mean(text, OBJECTIVES)}")


def _told(simulate: Simulate, tell: Tell) -> Simulate:
    """The same, which tells how many have been simulated."""
    done = 0

    def simulated(trials: Sequence[Trial]) -> list[Plan]:
        nonlocal done
        tell(f"{counted(done, 'plan')} simulated, {len(trials)} under way")
        made = simulate(trials)
        done += len(made)
        return made

    return simulated


def _changed(asked: Asked, change: str) -> Problem:
    """What is planned for with a change of --what-if.

    Raises:
        PlanError: the change is not valid, or does not go together with the rest.
    """
    _check_change(change)
    try:
        return asked.problem([change])
    except UserError as error:
        raise PlanError(f"--what-if {change!r}: {error}") from None


def _check_change(change: str) -> None:
    """Check an argument of --what-if.

    Raises:
        PlanError: it has no key and value, or no effect, since a plan gives this key.
    """
    key, equals, value = change.partition("=")
    own = _own(change)
    if not (key and equals) or (own is not None and not value):
        raise PlanError(f"--what-if {change!r} has no key and value; give KEY=VALUE, such as cluster=64xH100")
    keys = (key for name, value in _given(change).items() for key in leaves(name, value))
    for changed, decided in product(keys, _DECIDED):
        if changed == decided or changed.startswith(f"{decided}."):
            raise PlanError(
                f"--what-if {change!r}: a plan chooses {decided} itself; simulate a recipe that has it with tailrace "
                "simulate"
            )


def _own(change: str) -> tuple[str, str] | None:
    """The option that a change of --what-if is of, and its value; None where it is of a key of the recipe."""
    key, _, value = change.partition("=")
    option = "model" if key == "model.path" else key
    return (option, value) if option in _OWN else None


def _given(change: str) -> Mapping[str, Any]:
    """The keys of the recipe that a change of --what-if gives; none where it is of an option."""
    return {} if _own(change) else override_values(change)


def _recipe(asked: Asked, plans: Plans, output: Path) -> str:
    values = naming_foretold(changed_recipe(asked.recipe, asked.overrides), output)
    model = None if asked.model is None else model_path(asked.model)
    return recipe_text(values, plans.problem, plans.best, model=model)


def _picture(plans: Plans) -> str:
    every = {id(plan): plan for plan in [*plans.plans, *plans.front]}.values()
    on_front = {id(plan) for plan in plans.front}
    several = len(plans.problem.cluster.pools) > 1
    points = [
        Point(
            seconds=plan.step_s,
            usd=plan.usd_per_1000_steps,
            label=_devices_text(plan.allocation, kinds=several),
            is_best=plan is plans.best,
            on_front=id(plan) in on_front,
        )
        for plan in every
    ]
    title = f"{plans.problem.shape.name} under {plans.problem.workload}: devices that generate + devices that train"
    return front_svg(points, title=title)


def _document(plans: Plans, compared: Sequence[Comparison]) -> dict[str, Any]:
    return {
        "simulated": True,
        "model": plans.problem.shape.name,
        "workload": plans.problem.workload,
        "objective": plans.objective,
        "candidates": plans.enumerated,
        "simulated_candidates": len(plans.plans),
        "plans": [document(plan) for plan in plans.plans],
        "gains": [{"change": gain.change, **_against(plans.best, gain.plan)} for gain in plans.gains],
        "front": [document(plan) for plan in plans.front],
        "what_if": [
            {
                "change": one.change,
                "searched": one.searched,
                **({"why": one.why} if one.plan is None else _against(plans.best, one.plan)),
            }
            for one in compared
        ],
    }


def _against(best: Plan, other: Plan) -> dict[str, Any]:
    return {
        "step_s": other.step_s,
        "usd_per_1000_steps": other.usd_per_1000_steps,
        "devices": other.allocation.devices,
        "faster": best.step_s / other.step_s - 1,
    }


def _print(plans: Plans, compared: Sequence[Comparison]) -> None:
    console = Console(highlight=False)
    console.width = max(console.width, _WIDTH)
    console.print(_table(plans))
    best = plans.best
    console.print("\n".join([*_LEGEND, "", *_best_lines(plans), "", "With more of one thing:"]))
    console.print(_changes(best, [(gain.change, gain.plan) for gain in plans.gains]))
    if compared:
        console.print("\nWhat if, with the devices and the arrangement of this plan:")
        named = [
            (one.change + (", planned anew since it does not fit" if one.searched else ""), one.plan)
            for one in compared
            if one.plan is not None
        ]
        console.print(_changes(best, [("the plan as it is", best), *named]))
        for one in compared:
            if one.plan is None:
                console.print(f"  {one.change} fits nowhere: {one.why}", soft_wrap=True)
        if (text := _redrawn_text(best)) is not None:
            console.print(text, soft_wrap=True)
    if len(plans.front) > 1:
        console.print("\nOf all that were simulated, none beats these in both time and cost:")
        console.print(_front(plans))


_LEGEND = (
    "2×TP4·DP2: two engines of two replicas of TP 4. Of trainers, optimizer: its state is sharded over DP; full:",
    "weights and gradients, too; recompute, offload: of activations. micro-batch: tokens. tokens/s: of responses, of",
    "each device. busy, GiB: of engines and of the trainer. USD: for 1,000 steps.",
)


def _best_lines(plans: Plans) -> Iterator[str]:
    best = plans.best
    low, high = best.interval_s
    summary = best.summary
    yield (
        f"The best by {plans.objective}, of {len(plans.plans)} that were simulated and {plans.enumerated:,} that fit: "
        f"{best.mode}, {counted(best.allocation.devices, 'device')}."
    )
    yield f"  engines   {engines_text(best.candidate.engines)}"
    yield (
        f"  trainer   {trainer_text(best.allocation)}, micro-batches of {number(best.candidate.micro_batch_tokens)} "
        "tokens"
    )
    yield from _reference_lines(best)
    if best.critic is not None:
        yield f"  critic    {trainer_text(best.allocation, critic=True)}"
    yield f"  graders   {best.candidate.graders}"
    critic = "" if best.critic is None else f"critic {memory_text(best.critic)}; "
    yield (
        f"  memory    engine {memory_text(best.engine)}; trainer {memory_text(best.trainer)}; {critic}"
        f"{_rooms_text(best.allocation)}"
    )
    yield f"            with samples of up to {plans.problem.load.batches.longest:,} tokens, as long as they may be"
    yield f"  a step    {best.step_s:.1f} s; {low:.1f} to {high:.1f} ({interval_text(best)})"
    yield (
        f"  it costs  {best.usd_per_1000_steps:,.0f} USD for 1,000 steps, {best.usd_per_million_tokens:.2f} USD for a "
        f"million response tokens, {best.kwh_per_1000_steps:,.0f} kWh for 1,000 steps"
    )
    critic = "" if best.critic is None else f"critic {percent(summary.critic)}, "
    yield (
        f"  at work   engines {percent(summary.generating)} of the time, {critic}trainer {percent(summary.training)}; "
        f"it waits for samples {percent(summary.waiting_for_samples)}, for weights {percent(summary.weights)}"
    )
    yield f"  it binds  {best.bound.binds}. By itself, of each step: {_parts_text(best)}"


def _redrawn_text(best: Plan) -> str | None:
    """What a change of the lengths alone does to a step; None where that is little."""
    if max(abs(math.log(side)) for side in best.draws) < _NOISE:
        return None
    return (
        "  A change of the seed, the workload, or the number of samples draws other lengths. That alone changes a step "
        f"by {draws_text(best)}."
    )


def _rooms_text(allocation: Allocation) -> str:
    """What there is on a device, and what of it is left free."""
    kinds = {pool.kind: pool.device.memory_gib for pool in (allocation.rollout[0].pool, allocation.trainer)}
    each = " and ".join(f"{kind} has {size:g}" for kind, size in kinds.items())
    return f"{each}, of which engines leave {percent(1 - USED)}"


def _front(plans: Plans) -> Table:
    table = Table(box=None, pad_edge=False, header_style="", padding=(0, 2, 0, 2))
    for heading in ("devices", "mode", "engines", "trainer"):
        table.add_column(heading, no_wrap=True)
    for heading in ("s a step", "USD/1,000"):
        table.add_column(heading, justify="right")
    for one in plans.front:
        table.add_row(
            _devices_text(one.allocation, kinds=False),
            _mode_text(one),
            engines_text(one.candidate.engines),
            trainer_text(one.allocation),
            f"{one.step_s:.1f}",
            f"{one.usd_per_1000_steps:,.0f}",
        )
    return table


def _table(plans: Plans) -> Table:
    table = Table(box=None, pad_edge=False, header_style="", padding=(0, 2, 0, 0))
    for heading in ("mode", "engines", "trainer"):
        table.add_column(heading, no_wrap=True)
    for heading in ("micro-batch", "s a step", "from–to", "samples/s", "tokens/s", "busy %", "GiB", "USD/1,000"):
        table.add_column(heading, justify="right", no_wrap=True)
    for plan in plans.plans:
        low, high = plan.interval_s
        table.add_row(
            _mode_text(plan),
            engines_text(plan.candidate.engines),
            trainer_text(plan.allocation),
            number(plan.candidate.micro_batch_tokens),
            f"{plan.step_s:.1f}",
            f"{low:.1f}–{high:.1f}",
            number(plan.summary.samples_per_s),
            number(plan.tokens_per_s_per_device),
            f"{100 * plan.summary.generating:.0f} {100 * plan.summary.training:.0f}",
            f"{plan.engine.peak / GIB:.0f} {plan.trainer.peak / GIB:.0f}",
            f"{plan.usd_per_1000_steps:,.0f}",
        )
    return table


def _changes(best: Plan, changes: Sequence[tuple[str, Plan]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="", padding=(0, 2, 0, 2))
    table.add_column("")
    for heading in ("s a step", "faster by", "USD/1,000"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, other in changes:
        gain = best.step_s / other.step_s - 1
        said = "" if other is best else "about as fast" if abs(gain) < _NOISE else f"{gain:+.0%}".replace("%", " %")
        table.add_row(name, f"{other.step_s:.1f}", said, f"{other.usd_per_1000_steps:,.0f}")
    return table


def _mode_text(plan: Plan) -> str:
    mode = plan.mode
    if mode.colocated:
        return "colocated"
    return f"{'streaming' if mode.streaming else 'batches'} {mode.max_staleness}"


def _devices_text(allocation: Allocation, *, kinds: bool) -> str:
    """The devices that generate and those that train; `kinds`: with what they are called."""
    if allocation.colocated:
        return f"{allocation.devices} {allocation.trainer.kind}" if kinds else f"{allocation.devices}"
    rollout = f"{allocation.rollout_devices} {allocation.rollout[0].pool.kind}"
    both = rollout, f"{allocation.trainer_devices} {allocation.trainer.kind}"
    return "+".join(both if kinds else (text.split()[0] for text in both))


def _reference_lines(plan: Plan) -> list[str]:
    reference = plan.allocation.reference
    if reference is None:
        return []
    each = f"{reference.tp} {plan.allocation.trainer.kind}"
    return [f"  reference {each}" if reference.dp == 1 else f"  reference {reference.dp} workers of {each} each"]


def _parts_text(plan: Plan) -> str:
    bound = plan.bound
    parts = {
        "generation": bound.generation_s,
        "the longest response": bound.longest_s,
        "training": bound.training_s,
        "reference": bound.reference_s,
        "critic": bound.critic_s,
        "graders": bound.grading_s,
        "weights": bound.weights_s,
    }
    return ", ".join(f"{name} {seconds:.1f} s" for name, seconds in parts.items() if seconds >= 0.05)
