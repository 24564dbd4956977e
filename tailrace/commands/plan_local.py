"""`tailrace plan --cluster local`: how a recipe is run the fastest on this machine.

recipe ──▶ a few steps' responses (own_responses.py) ──▶ profiles of engines and trainers ──▶ simulations ──▶ recipe
"""

import json as json_module
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from tailrace.commands.foretell import foretold_here, shape_here
from tailrace.commands.own_responses import STEPS, own_responses
from tailrace.commands.planned_files import check_new_plan, naming_foretold, write_plan
from tailrace.commands.profile_machine import in_process, measure_choices
from tailrace.commands.run_sizes import sized
from tailrace.commands.waiting import Tell, waiting
from tailrace.config.engine import NativeEngineConfig
from tailrace.config.load import changed_recipe, load_config
from tailrace.config.recipe_text import write_yaml
from tailrace.config.run import RunConfig
from tailrace.errors import PlanError, counted
from tailrace.host.cpu import cpu_name, usable_cores
from tailrace.planner.local import LocalPlan, LocalProblem, as_it_is_s, local_plans
from tailrace.planner.run_memory import memory_of
from tailrace.planning.model_shape.base import ModelShape
from tailrace.planning.step_times.machine import read_machine_profile
from tailrace.report.text import number
from tailrace.simulator.drawing import draw_steps
from tailrace.workloads.replay import Replay
from tailrace.workloads.samplers.factory import open_workload

_SHOWN = 10
_WIDTH = 110
"""Columns of the table at least; a terminal that is narrower breaks its lines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedHere:
    """The arguments of the command."""

    recipe: Path
    overrides: Sequence[str]
    workload: str | None
    profile: Path | None
    """A file of `tailrace profile machine`."""
    search_modes: bool


def plan_local(asked: AskedHere, *, unused: Mapping[str, Any], output: Path | None, force: bool, json: bool) -> None:
    """Profile this machine, plan, print, and write the best plan as a recipe to `output`.

    `unused`: the values of options that have no meaning here; each has to be empty.

    Raises:
        UserError: the arguments are not valid, a file is there already, or the machine cannot be profiled.
    """
    for option, value in unused.items():
        if value:
            raise PlanError(f"{option} has no meaning with --cluster local; leave it out")
    if output is not None:
        check_new_plan(output, force=force)
    with waiting() as tell:
        problem = local_problem(asked, tell)
        tell("simulating every arrangement")
        plans = local_plans(problem, search_modes=asked.search_modes)
    if json:
        figures = {"simulated": True, "as_it_is_s": as_it_is_s(problem), "plans": [document(plan) for plan in plans]}
        print(json_module.dumps(figures))
    else:
        _print(plans, as_it_is_s(problem))
    if output is not None:
        recipe = _comment(plans[0]) + write_yaml(naming_foretold(plans[0].values, output))
        write_plan(output, recipe, foretold_here(problem, plans[0]))


def local_problem(asked: AskedHere, tell: Tell = lambda text: None) -> LocalProblem:
    """Measure what is planned for. `tell` takes what is done now.

    Raises:
        UserError: the arguments are not valid, or the machine cannot be profiled.
    """
    config = load_config(asked.recipe, asked.overrides)
    if config.device != "cpu":
        raise PlanError(
            f"device is {config.device}, and --cluster local is for the cores of this machine; give GPUs by their "
            "kind, such as --cluster 8xH100"
        )
    if not isinstance(config.engine, NativeEngineConfig):
        raise PlanError(f"engine.type is {config.engine.type!r}; only the native engine can be planned for here")
    cores = usable_cores()
    profile = read_machine_profile(asked.profile) if asked.profile else None
    if profile is not None and (profile.cores, profile.model) != (len(cores), config.model.path):
        raise PlanError(
            f"{asked.profile} is of {profile.model} on {profile.cores} cores, and this is {config.model.path} on "
            f"{len(cores)}; make it anew with tailrace profile machine"
        )
    if profile is not None and profile.hardware != cpu_name():
        raise PlanError(
            f"{asked.profile} is of {profile.hardware}, and this machine is {cpu_name()}; make it anew with tailrace "
            "profile machine"
        )
    shape = shape_here(config)
    tell("finding out the lengths of responses")
    drawn = _lengths(config, shape, asked.workload)
    return LocalProblem(
        values=changed_recipe(asked.recipe, asked.overrides),
        config=config,
        drawn=drawn,
        needed_bytes=_needing(drawn, shape),
        memory_bytes=psutil.virtual_memory().total,
        shape=shape,
        profile=profile or measure_choices(config, tell),
        cores=cores,
    )


def _needing(drawn: Replay, shape: ModelShape) -> Callable[[RunConfig], float]:
    """What tells the memory that a recipe takes, as `train --dry-run` does."""
    tokens = [group[0].prompt_tokens for group in drawn.groups]
    return lambda config: memory_of(sized(config, shape, tokens)).total_bytes


def _lengths(config: RunConfig, shape: ModelShape, workload: str | None) -> Replay:
    """The lengths of a few training steps: of a workload, or else of responses to the recipe's own prompts.

    Raises:
        PlanError: a sample of the workload is too long.
    """
    if workload is None:
        return in_process(own_responses, config.model_dump_json())
    return draw_steps(open_workload(workload), config, shape, steps=STEPS)


def document(plan: LocalPlan) -> dict[str, Any]:
    """The figures of a plan, for machines."""
    summary = plan.summary
    return {
        "mode": plan.mode.values,
        "tp": plan.tp,
        "dp": plan.dp,
        "engine_cores": plan.cores,
        "trainer_cores": plan.cores,
        "max_batch_size": plan.slots,
        "micro_batch_tokens": plan.micro_batch_tokens,
        "step_s": plan.step_s,
        "samples_per_s": summary.samples_per_s,
        "generating": summary.generating,
        "training": summary.training,
    }


def _comment(plan: LocalPlan) -> str:
    return f"# A plan for this machine: {plan.mode}, {plan.step_s:.2f} s a step.\n"


def _print(plans: Sequence[LocalPlan], as_it_is: float | None) -> None:
    console = Console(highlight=False)
    console.width = max(console.width, _WIDTH)
    table = Table(box=None, pad_edge=False, header_style="", padding=(0, 2, 0, 0))
    for heading in ("mode", "engine"):
        table.add_column(heading, no_wrap=True)
    for heading in ("sequences", "micro-batch", "s a step", "samples/s", "busy %"):
        table.add_column(heading, justify="right", no_wrap=True)
    for plan in plans[:_SHOWN]:
        summary = plan.summary
        table.add_row(
            str(plan.mode),
            _engine_text(plan),
            str(plan.slots),
            str(plan.micro_batch_tokens),
            f"{plan.step_s:.2f}",
            number(summary.samples_per_s),
            f"{100 * summary.generating:.0f} {100 * summary.training:.0f}",
        )
    console.print(table)
    console.print(
        "sequences: that a replica decodes together. micro-batch: tokens. busy: of the engine and of the trainer."
    )
    lines = ["", f"The best of {len(plans):,}: {plans[0].mode}, {plans[0].step_s:.2f} s a step."]
    if as_it_is is not None:
        gain = as_it_is / plans[0].step_s - 1
        lines.append(
            f"The recipe as it is would take {as_it_is:.2f} s; the best is {gain:.0%} faster.".replace("%", " %")
        )
    console.print("\n".join(lines))


def _engine_text(plan: LocalPlan) -> str:
    degrees = "·".join(f"{name}{degree}" for name, degree in (("TP", plan.tp), ("DP", plan.dp)) if degree > 1)
    return f"{counted(plan.cores, 'core')} {degrees}".strip()
