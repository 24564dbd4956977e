"""`tailrace plan --cluster local`: how a recipe is run the fastest on this machine.

recipe ──▶ a few steps' responses, for their lengths ──▶ profiles of engines and trainers ──▶ simulations ──▶ recipe
"""

import json as json_module
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import polars as pl
import torch
from rich.console import Console
from rich.table import Table

from tailrace.commands.files import check_new_file
from tailrace.commands.foretell import PLAN_SUFFIX, foretold_here, write_foretold
from tailrace.commands.profile_machine import in_process, measure_choices
from tailrace.commands.this_machine import this_machine
from tailrace.config.engine import NativeEngineConfig
from tailrace.config.load import load_config, read_recipe
from tailrace.config.overrides import merged, override_values
from tailrace.config.recipe_text import write_yaml
from tailrace.config.recipes import find_recipe
from tailrace.config.run import RunConfig
from tailrace.engine.core import EngineCore
from tailrace.engine.factory import make_backend
from tailrace.errors import PlanError
from tailrace.host.compute import prepare_torch
from tailrace.host.cpu import usable_cores
from tailrace.host.whole_file import whole_file
from tailrace.models.resolve import resolve_model
from tailrace.planner.local import (
    LocalPlan,
    LocalProblem,
    as_it_is_s,
    local_plans,
)
from tailrace.planner.outlook import Machine, Prompts, outlook
from tailrace.planning.model_shape.base import ModelShape
from tailrace.planning.model_shape.hugging_face import read_shape
from tailrace.planning.step_times.machine import read_machine_profile
from tailrace.report.text import number
from tailrace.run.inputs import load_inputs
from tailrace.run.workers.pools import run_pools
from tailrace.simulator.limits import check_lengths
from tailrace.types import Request, Sample
from tailrace.workloads.replay import Replay
from tailrace.workloads.samplers.factory import open_workload
from tailrace.workloads.trace import Provenance, Trace

_STEPS = 4
"""Training steps whose responses are generated, for their lengths."""
_GENERATE_S = 60.0
"""Seconds after which no further step is begun, and the first one is given up after twice as many."""
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
        check_new_file("--output", output, force=force)
        check_new_file("--output", output.with_suffix(PLAN_SUFFIX), force=force)
    problem = local_problem(asked)
    plans = local_plans(problem, search_modes=asked.search_modes)
    if output is not None:
        beside = output.with_suffix(PLAN_SUFFIX)
        write_foretold(beside, foretold_here(problem, plans[0]))
        values = merged(plans[0].values, {"observe": {"plan": str(beside)}})
        with whole_file(output) as partial:
            partial.write_text(_comment(plans[0]) + write_yaml(values), encoding="utf-8")
    if json:
        figures = {"simulated": True, "as_it_is_s": as_it_is_s(problem), "plans": [document(plan) for plan in plans]}
        print(json_module.dumps(figures))
    else:
        _print(plans, as_it_is_s(problem))


def local_problem(asked: AskedHere) -> LocalProblem:
    """Measure what is planned for.

    Raises:
        UserError: the arguments are not valid, or the machine cannot be profiled.
    """
    values: dict[str, Any] = read_recipe(find_recipe(asked.recipe))
    for override in asked.overrides:
        values = merged(values, override_values(override))
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
    shape = replace(read_shape(resolve_model(config.model)), name=config.model.path)
    drawn = _lengths(config, shape, asked.workload)
    machine = this_machine(config.device, ["bfloat16", "float32"])
    return LocalProblem(
        values=values,
        config=config,
        drawn=drawn,
        needed_bytes=_needing(drawn, shape, machine),
        memory_bytes=machine.device.memory_bytes,
        shape=shape,
        profile=profile or measure_choices(config),
        cores=cores,
    )


def _needing(drawn: Replay, shape: ModelShape, machine: Machine) -> Callable[[RunConfig], float]:
    """What tells the memory that a recipe takes, as `train --dry-run` does."""
    tokens = [group[0].prompt_tokens for group in drawn.groups]
    prompts = Prompts(mean=statistics.fmean(tokens), longest=max(tokens))

    def needed(config: RunConfig) -> float:
        engines = {pool: make_backend(engine).size for pool, engine in config.engines.items()}
        return outlook(config, shape, engines, prompts, machine, run_pools(config)).total_bytes

    return needed


def _lengths(config: RunConfig, shape: ModelShape, workload: str | None) -> Replay:
    """The lengths of a few training steps: of a workload, or else of responses to the recipe's own prompts.

    Raises:
        PlanError: a sample of the workload is too long.
    """
    if workload is None:
        return Replay.of(in_process(_generated, config.model_dump_json()))
    size = config.algorithm.group_size
    drawn = open_workload(workload).sample(
        steps=_STEPS, groups=config.groups_per_step, group_size=size, seed=config.seed
    )
    replay = Replay.of(drawn)
    check_lengths(replay, workload, config, shape)
    return replay


def _generated(recipe: str) -> Trace:
    """Generate responses to the recipe's first prompts, and return their lengths.

    Raises:
        PlanError: a step of them takes too long.
    """
    config = RunConfig.model_validate_json(recipe)
    prepare_torch(config.device, config.threads)
    inputs = load_inputs(config)
    engine = config.engine
    assert isinstance(engine, NativeEngineConfig), "others are refused"
    groups, size = config.groups_per_step, config.algorithm.group_size
    prompts = inputs.prompts.train
    rows: list[dict[str, Any]] = []
    asked: dict[int, Request] = {}
    began = time.monotonic()
    with closing(EngineCore(engine, inputs.model_dir, device=torch.device(config.device))) as core:
        for step in range(_STEPS):
            if step and time.monotonic() > began + _GENERATE_S:
                break
            for place in range(groups):
                prompt = prompts[(step * groups + place) % len(prompts)]
                for sample in range(size):
                    number = (step * groups + place) * size + sample
                    asked[number] = Request(
                        request_id=number,
                        group_id=number // size,
                        number=sample,
                        prompt_ids=prompt.prompt_ids,
                        sampling=config.sampling,
                        seed=config.seed + number,
                    )
                    core.add(asked[number])
            while core.has_work:
                rows += [_row(asked[made.request_id], made, groups) for made in core.step()]
                if time.monotonic() > began + 2 * _GENERATE_S and not step:
                    raise PlanError(
                        f"a step of responses takes more than {2 * _GENERATE_S:.0f} s here; give their lengths with "
                        "--workload"
                    )
    return Trace.of(pl.DataFrame(rows), Provenance(source="this model's own responses"))


def _row(asked: Request, made: Sample, groups: int) -> dict[str, Any]:
    return {
        "step": asked.group_id // groups,
        "group": asked.group_id % groups,
        "sample": asked.number,
        "prompt_tokens": len(asked.prompt_ids),
        "response_tokens": len(made.response_ids),
        "finish_reason": made.finish_reason.value,
    }


def document(plan: LocalPlan) -> dict[str, Any]:
    """The figures of a plan, for machines."""
    summary = plan.summary
    return {
        "mode": plan.mode.values,
        "tp": plan.tp,
        "dp": plan.dp,
        "engine_cores": plan.engine_cores,
        "trainer_cores": plan.trainer_cores,
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
    cores = f"{plan.engine_cores} core{'s' if plan.engine_cores > 1 else ''}"
    degrees = "·".join(f"{name}{degree}" for name, degree in (("TP", plan.tp), ("DP", plan.dp)) if degree > 1)
    return f"{cores} {degrees}".strip()
