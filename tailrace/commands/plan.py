"""`tailrace plan`: which devices generate and which train, before any of them is paid for."""

import json as json_module
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tailrace.commands.allocation_text import bases_text, engines_text, memory_text, trainer_text
from tailrace.commands.files import check_new_file
from tailrace.commands.foretell import foretold_by
from tailrace.commands.planned_files import check_new_plan, naming_foretold, write_plan, write_text
from tailrace.config.base import GIB
from tailrace.config.load import changed_recipe, load_for_cluster
from tailrace.config.overrides import override_values
from tailrace.errors import PlanError, did_you_mean
from tailrace.planner.problem import Problem
from tailrace.planner.processes import side_by_side
from tailrace.planner.recipe import recipe_text
from tailrace.planner.search import Plans
from tailrace.planner.search import plan as search
from tailrace.planner.trial import Objective, Plan, document
from tailrace.planner.what_if import Comparison, what_if
from tailrace.planning.hardware.clusters import open_cluster
from tailrace.planning.model_shape.catalogue import find_shape
from tailrace.planning.tp_profile import TPProfile
from tailrace.report.front import Point, front_svg
from tailrace.report.text import number
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
        for change in changes:
            key, equals, value = change.partition("=")
            if not (key and equals) or (_is_own(change) and not value):
                raise PlanError(f"--what-if {change!r} has no key and value; give KEY=VALUE, such as cluster=64xH100")
        own = dict(change.split("=", 1) for change in changes if _is_own(change))
        overrides = [*self.overrides, *(change for change in changes if not _is_own(change))]
        config = load_for_cluster(self.recipe, overrides)
        return Problem.of(
            config,
            find_shape(own.get("model") or self.model or config.model.path),
            open_cluster(own.get("cluster", self.cluster)),
            open_workload(own.get("workload") or self._workload),
            steps=self.steps,
            profile=None if self.profile is None else TPProfile.read(self.profile),
        )

    @property
    def _workload(self) -> str:
        if self.workload is None:
            raise PlanError("no workload is given; give --workload, such as math-32b: tailrace trace workloads lists")
        return self.workload


_WIDTH = 140
"""Columns of the tables at least; a terminal that is narrower breaks their lines."""
_OWN = ("cluster", "workload", "model")
"""Options that --what-if changes, too. As keys of a recipe, two of these are sections, which have keys of their own."""


def plan(
    asked: Asked,
    *,
    objective: str,
    candidates: int | None,
    search_modes: bool,
    changes: Sequence[str],
    output: Path | None,
    picture: Path | None,
    force: bool,
    json: bool,
) -> None:
    """Plan, print, and write what was asked for.

    Raises:
        UserError: the arguments are not valid, a file is there already, or nothing fits.
    """
    aim = _objective(objective)
    if output is not None:
        check_new_plan(output, force=force)
    if picture is not None:
        check_new_file("--picture", picture, force=force)
    problem = asked.problem()
    others = [(change, asked.problem([change])) for change in changes]
    with side_by_side(problem) as simulate:
        plans = search(problem, objective=aim, candidates=candidates, search_modes=search_modes, simulate=simulate)
    if output is not None:
        write_plan(output, _recipe(asked, plans, output), foretold_by(plans))
    if picture is not None:
        write_text(picture, _picture(plans))
    compared = [what_if(plans.best, other, change, _given(change), aim) for change, other in others]
    if json:
        print(json_module.dumps(_document(plans, compared)))
    else:
        _print(plans, compared)


def _is_own(change: str) -> bool:
    """Whether a change of --what-if is of an option, and not of a key of the recipe."""
    return change.partition("=")[0] in _OWN


def _objective(text: str) -> Objective:
    for objective in OBJECTIVES:
        if text == objective:
            return objective
    raise PlanError(f"--objective is {text!r}; expected {', '.join(OBJECTIVES)}{did_you_mean(text, OBJECTIVES)}")


def _given(change: str) -> Mapping[str, Any]:
    return {} if _is_own(change) else override_values(change)


def _recipe(asked: Asked, plans: Plans, output: Path) -> str:
    values = naming_foretold(changed_recipe(asked.recipe, asked.overrides), output)
    return recipe_text(values, plans.problem.config, plans.best)


def _picture(plans: Plans) -> str:
    every = {id(plan): plan for plan in [*plans.plans, *plans.front]}.values()
    on_front = {id(plan) for plan in plans.front}
    points = [
        Point(
            seconds=plan.step_s,
            usd=plan.usd_per_1000_steps,
            label=_devices_text(plan),
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
        "plans": [document(plan) for plan in plans.plans],
        "gains": [{"change": gain.change, **_against(plans.best, gain.plan)} for gain in plans.gains],
        "front": [document(plan) for plan in plans.front],
        "what_if": [
            {"change": one.change, "searched": one.searched, **_against(plans.best, one.plan)} for one in compared
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
    console.print(
        "tokens/s: of responses, of each device. busy, GiB: of engines and of the trainer. USD: for 1,000 steps."
    )
    best = plans.best
    low, high = best.interval_s
    lines = [
        "",
        f"The best of {plans.enumerated:,} that fit, by {plans.objective}: {best.mode}, "
        f"{best.allocation.devices} devices.",
        f"  engines   {engines_text(best.candidate.engines)}",
        f"  trainer   {trainer_text(best.allocation)}, micro-batches of "
        f"{number(best.candidate.micro_batch_tokens)} tokens",
        *_reference_lines(best),
        f"  graders   {best.candidate.graders}",
        f"  memory    engine {memory_text(best.engine)}; trainer {memory_text(best.trainer)}",
        f"  a step    {best.step_s:.1f} s; {low:.1f} to {high:.1f} ({bases_text(best.bases)})",
        f"  it costs  {best.usd_per_1000_steps:,.0f} USD for 1,000 steps, {best.usd_per_million_tokens:.2f} USD for a "
        f"million response tokens, {best.kwh_per_1000_steps:,.0f} kWh for 1,000 steps",
        f"  it waits  for {best.bound.binds}: {_parts_text(best)}",
        "",
        "With more of one thing:",
    ]
    console.print("\n".join(lines))
    console.print(_changes(best, [(gain.change, gain.plan) for gain in plans.gains]))
    if compared:
        console.print("\nWhat if:")
        named = [(one.change + (", planned anew" if one.searched else ""), one.plan) for one in compared]
        console.print(_changes(best, [("the plan as it is", best), *named]))


def _table(plans: Plans) -> Table:
    table = Table(box=None, pad_edge=False, header_style="", padding=(0, 2, 0, 0))
    for heading in ("mode", "engines", "trainer"):
        table.add_column(heading, no_wrap=True)
    for heading in ("s a step", "from–to", "samples/s", "tokens/s", "busy %", "GiB", "USD/1,000"):
        table.add_column(heading, justify="right", no_wrap=True)
    for plan in plans.plans:
        low, high = plan.interval_s
        table.add_row(
            _mode_text(plan),
            engines_text(plan.candidate.engines),
            trainer_text(plan.allocation),
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
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 2))
    for name, other in changes:
        gain = best.step_s / other.step_s - 1
        said = "" if other is best else f"{gain:+.1%}"
        table.add_row(name, f"{other.step_s:.1f} s", said, f"{other.usd_per_1000_steps:,.0f} USD")
    return table


def _mode_text(plan: Plan) -> str:
    mode = plan.mode
    if mode.colocated:
        return "colocated"
    return f"{'streaming' if mode.streaming else 'batches'} {mode.max_staleness}"


def _devices_text(plan: Plan) -> str:
    allocation = plan.allocation
    if allocation.colocated:
        return f"{allocation.devices}"
    return f"{allocation.rollout_devices}+{allocation.trainer_devices}"


def _reference_lines(plan: Plan) -> list[str]:
    reference = plan.allocation.reference
    if reference is None:
        return []
    return [f"  reference {reference.dp} of {reference.tp} {plan.allocation.trainer.kind}"]


def _parts_text(plan: Plan) -> str:
    bound = plan.bound
    parts = {
        "generation": bound.generation_s,
        "the longest response": bound.longest_s,
        "training": bound.training_s,
        "reference": bound.reference_s,
        "graders": bound.grading_s,
        "weights": bound.weights_s,
    }
    return ", ".join(f"{name} {seconds:.1f} s" for name, seconds in parts.items() if seconds >= 0.05)
