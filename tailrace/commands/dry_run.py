"""`tailrace train --dry-run`: prints the resolved configuration and what the run would take, as the planner sees it.

It writes nothing, and starts only a grader, which is asked whether answers can be right.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tailrace.algorithms.factory import make_algorithm
from tailrace.commands.run_sizes import sized
from tailrace.commands.this_machine import this_machine
from tailrace.config.base import GIB
from tailrace.config.hardware import DType
from tailrace.config.recipe_text import write_yaml
from tailrace.config.rewards import ModelReward
from tailrace.config.run import RunConfig
from tailrace.config.written import shown
from tailrace.errors import ConfigError, ModelNotHere, PlanError, counted, quoted
from tailrace.host.compute import prepare_torch
from tailrace.models.info import describe_model
from tailrace.planner.outlook import Machine, Outlook, outlook
from tailrace.planner.run_memory import RunMemory, Worker, memory_of
from tailrace.planner.sized_run import SizedRun
from tailrace.planning.foretold import read_foretold
from tailrace.planning.memory import CONTEXT_BYTES, RESERVED, Memory
from tailrace.planning.model_shape.catalogue import find_shape
from tailrace.planning.model_shape.hugging_face import read_shape
from tailrace.planning.step_times.basis import Kind
from tailrace.report.text import duration
from tailrace.rewards.answers import check_answers
from tailrace.rewards.graders import Graders
from tailrace.run.checks import check_place, check_recipe
from tailrace.run.directory import RunDirectory
from tailrace.run.inputs import Inputs
from tailrace.types import Prompt

_PROMPT_TOKENS = 1024
"""Tokens of a prompt where they cannot be counted here."""
MAX_SHOWN = 2000
"""Maximum number of characters that are shown of a prompt."""


def print_plan(config: RunConfig, *, resume: bool, checkpoint: Path | None = None) -> None:
    """Print the whole configuration as YAML, then what it takes as YAML comments, so that the output is a recipe.

    Raises:
        UserError: the model, the prompts, the grader, the queue, the machine or the directory do not fit what was asked
            for, or the run to resume.
    """
    directory = RunDirectory(Path(config.output_dir))
    if resume:
        directory.check_resumed(config, checkpoint)
    else:
        directory.check_new()
    directory.check_makeable()
    directory.plan_given(config)
    absent = _absent_device(config)
    if absent is None:
        check_place(config)
    _print(config, _checked(config, here=absent is None), absent, plan=directory.plan_of(config))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Checked:
    """What is known of a recipe here."""

    run: SizedRun
    inputs: Inputs | None
    """None where the model is not here, which reads the prompts."""
    ungraded: str = ""
    """Why no answer was graded, where a reward model's device is not here, as the run's is not."""


def _absent_device(config: RunConfig) -> str | None:
    """Why this machine cannot use the run's device; None where it can."""
    return _absent(config.device, config.threads)  # the measurements are made in this process in any case


def _absent(device: str, threads: int | None = None) -> str | None:
    try:
        prepare_torch(device, threads)
    except ConfigError as error:
        return str(error)
    return None


def _checked(config: RunConfig, *, here: bool) -> _Checked:
    """Check a recipe. Of a model that is not here, the sizes may be known.

    Raises:
        UserError: the recipe cannot be run.
    """
    try:
        inputs = check_recipe(config, here=here)
    except ModelNotHere as error:
        if not str(error).startswith("model.path"):  # of a reward model, or of predicted lengths
            raise
        try:
            shape = find_shape(config.model.path)
        except PlanError:
            raise error from None
        return _Checked(run=sized(config, shape, [config.prompts.max_prompt_tokens or _PROMPT_TOKENS]), inputs=None)
    run = sized(config, read_shape(inputs.model_dir), [len(prompt.prompt_ids) for prompt in inputs.prompts.train])
    ungraded = "" if here else _absent_reward_model(config)
    if not ungraded:
        asyncio.run(_check_rewards(config, inputs.prompts.by_source))
    return _Checked(run=run, inputs=inputs, ungraded=ungraded)


def _absent_reward_model(config: RunConfig) -> str:
    """Why this machine cannot use the device of a reward model; empty where there is none."""
    for grading in config.rewards.each.values():
        if isinstance(grading.grader, ModelReward) and (why := _absent(grading.grader.device)) is not None:
            return f"the reward model's {why}"
    return ""


def _print(config: RunConfig, checked: _Checked, absent: str | None, *, plan: Path | None) -> None:
    """Print a recipe that was checked. `absent`: why this machine cannot use its device. `plan`: see `plan_of`."""
    run, inputs = checked.run, checked.inputs
    machine = this_machine(config.device, _dtypes(run)) if absent is None else None
    memory = memory_of(run)
    found = None if machine is None else outlook(run, machine)
    print(write_yaml(shown(config.resolved)), end="")
    for line in _model_lines(config, run) if inputs is None else _input_lines(inputs, run):
        print(f"# {line}")
    for line in _memory_lines(config, memory, machine):
        print(f"# {line}")
    if run.has_known_trainer:
        models = [run.shape, *([] if run.critic is None else [run.critic.shape])]
        size = _gib(12.0 * sum(model.parameters for model in models))  # weights and both moments in fp32
        print(f"# disk: {size} a checkpoint, {config.checkpoint.keep} kept, one more on saving")
    if absent is not None:
        print(f"# not checked: {absent}; so neither whether its memory suffices nor the seconds of a step are known")
    if checked.ungraded:
        print(f"# not checked: {checked.ungraded}; so no answer was graded")
    if found is not None and machine is not None:
        for line in _time_lines(config, found, machine):
            print(f"# {line}")
    for line in _planned_lines(config, plan):
        print(f"# {line}")
    if unknown := list(_unknown(run)):
        print(f"# what your {' and your '.join(unknown)} will take is not known, and not counted")


def _model_lines(config: RunConfig, run: SizedRun) -> Iterator[str]:
    """What is said of a model that is not here."""
    yield f"model: {run.shape.name}, {run.shape.parameters / 1e6:.0f}M parameters, context {run.shape.context}"
    yield (
        f"not checked: {config.model.path} is not here, and cannot be had from the hub; so neither its files, nor the "
        "prompts, nor whether answers can be right"
    )
    yield f"prompts are taken to have {run.prompts.longest:,} tokens"


def _input_lines(inputs: Inputs, run: SizedRun) -> Iterator[str]:
    """The model, the prompts, and one of these."""
    info = describe_model(inputs.model_dir)
    yield f"model: {info.family}, {info.parameters / 1e6:.0f}M parameters, context {info.context_length}"
    held = ", ".join(f"{len(held)} in {name}" for name, held in inputs.prompts.evaluated.items()) or "none held out"
    yield f"prompts: {len(inputs.prompts.train)} to train on ({run.prompts.mean:.0f} tokens in the mean), {held}"
    for why, count in inputs.prompts.dropped.items():
        yield f"{count} prompts are dropped: {why}"
    yield "one of them, as the model reads it:"
    for line in _shown(inputs.prompts.train[0].text):
        yield f"  {line}"


def _planned_lines(config: RunConfig, plan: Path | None) -> Iterator[str]:
    """What a plan has foretold."""
    if plan is None:
        return
    foretold = read_foretold(plan)
    low, high, seconds = foretold.least_s, foretold.most_s, foretold.figures.step_s
    yield f"time by its plan: {seconds:.1f} s a step, {low:.1f} to {high:.1f}, of {foretold.of}"
    if foretold.trainer_devices > 1 and config.trainer.backend.type == "single":
        yield (
            f"its plan has a trainer on {foretold.trainer_devices} devices, and trainer.backend.type=single has one; "
            "give a backend of your own that has them (docs/adapters.md)"
        )


def _dtypes(run: SizedRun) -> list[DType]:
    """Those in which something is computed."""
    engines = {size.dtype for size in run.engines.values() if size is not None and size.has_model}
    return sorted({run.setup.dtype, *engines})


def _unknown(run: SizedRun) -> Iterator[str]:
    """What is the user's own."""
    if None in run.engines.values():
        yield "engine"
    if not run.has_known_trainer:
        yield "trainer"
    if any(isinstance(grading.grader, ModelReward) for grading in run.config.rewards.each.values()):
        yield "reward model"
    if run.table is None:
        yield from (task.name for task, _ in make_algorithm(run.config.algorithm).other_models())


async def _check_rewards(config: RunConfig, sources: Mapping[str, Sequence[Prompt]]) -> None:
    """Make each grader in a process of its own, as a run does, and check answers with it."""
    async with Graders(config.rewards.with_one_worker) as graders:
        await check_answers(config.rewards, sources, graders)


def _shown(text: str) -> list[str]:
    """Return the lines of a prompt in quotes, with special characters escaped; the middle of a long prompt is left
    out."""
    if len(text) > MAX_SHOWN:
        left_out = len(text) - MAX_SHOWN
        return [*_shown(text[: MAX_SHOWN // 2]), f"… {left_out:,} characters …", *_shown(text[-MAX_SHOWN // 2 :])]
    return [quoted(line, MAX_SHOWN + 2) for line in text.splitlines(keepends=True)]


def _memory_lines(config: RunConfig, found: RunMemory, machine: Machine | None) -> Iterator[str]:
    """All together, then the worst instant of each worker. `machine`: None where the run's device is not here."""
    total = found.total_bytes
    if machine is None or machine.threads is None:
        room = "; each worker has devices of its own, or its turn on one"
    elif config.cluster.address is not None:
        room = " of all machines together"
    else:
        has = machine.device.memory_bytes
        room = f" of the {_gib(has)} of this machine"
        if total > has:
            room += f", which lacks {_gib(total - has)}"
    yield f"memory: about {_gib(total)}{room}"
    for worker in found.workers:
        yield f"  {_named(worker)}: {_worst(worker.memory)}{_device_text(worker.memory, machine)}"
    for name, size in found.others.items():
        yield f"  {name}: {_gib(size)}"


def _named(worker: Worker) -> str:
    return worker.name if worker.count == 1 else f"{worker.name}, each of {worker.count}"


def _worst(memory: Memory) -> str:
    """The peak, when that is, and what takes the most then."""
    return f"{_gib(memory.peak)} at the worst instant, the {memory.worst} ({memory.parts_text(2)})"


def _device_text(memory: Memory, machine: Machine | None) -> str:
    """Whether it fits on a device of its own."""
    if machine is None or machine.threads is not None:
        return ""
    needed, size = memory.peak * RESERVED + CONTEXT_BYTES, machine.device.memory_bytes
    reserved = f"; with what its allocator reserves, {_gib(needed)} of the {_gib(size)} of {machine.kind}"
    return reserved if needed <= size else f"{reserved}, which lacks {_gib(needed - size)}"


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"


def _time_lines(config: RunConfig, found: Outlook, machine: Machine) -> Iterator[str]:
    parts = {"generation": found.generation_s, "training": found.training_s}
    known = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in parts.items() if seconds is not None)
    if not known:
        return
    longest = f"if every response is {config.sampling.max_new_tokens} tokens long"
    if found.bound is None:
        yield f"time: about {known} a step {longest}"
    else:
        seconds = found.bound.seconds
        low, high = found.basis.interval(seconds)
        beside = ", side by side" if config.pipeline.max_staleness else ""
        yield f"time: about {seconds:.1f} s a step, {low:.1f} to {high:.1f}, {longest} ({known}{beside})"
        steps = counted(config.trainer.steps, "step")
        yield f"time: {steps} in about {duration(config.trainer.steps * seconds)}, evaluations not counted"
    yield f"time rests on {_BASES[found.basis.kind]} {_rates(machine)}"
    if config.device != "cpu":
        launching = config.engine.type == "native" and not config.engine.cuda_graphs
        own = "the trainer, and of the engine without engine.cuda_graphs" if launching else "the trainer"
        yield f"time between the kernels of {own} is not counted; with a small model it is as much again"


_BASES: dict[Kind, str] = {
    "analytic": "operations and bytes at the rates of",
    "kernels": "kernels that were measured on",
    "profiled": "a profile of",
    "calibrated": "operations and bytes, scaled by measured steps, at the rates of",
}


def _rates(machine: Machine) -> str:
    if not machine.is_measured:
        return machine.kind
    rates = ", ".join(f"{rate:.3g} Tflop/s in {dtype}" for dtype, rate in machine.device.tflops.items())
    return f"{machine.kind}, measured just now: {rates}, {machine.device.memory_gb_s:.3g} GB/s"
