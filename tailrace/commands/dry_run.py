"""`tailrace train --dry-run`: prints the resolved configuration and an estimate of what the run would take.

It writes nothing, and starts only a grader, which is asked whether answers can be right.
"""

import asyncio
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from tailrace.algorithms.base import Algorithm
from tailrace.algorithms.factory import make_algorithm
from tailrace.algorithms.table import Score
from tailrace.config.base import GIB
from tailrace.config.recipe_text import write_yaml
from tailrace.config.run import RunConfig
from tailrace.config.written import shown
from tailrace.engine.factory import make_backend
from tailrace.errors import quoted
from tailrace.host.compute import now, prepare_torch
from tailrace.models.info import describe_model
from tailrace.planning.estimate import Estimate, MachineSpeed, ModelSize, estimate
from tailrace.rewards.answers import check_answers
from tailrace.rewards.pool import GraderPool
from tailrace.run.checks import check_place, check_recipe
from tailrace.run.directory import RunDirectory
from tailrace.run.workers.pools import run_pools
from tailrace.types import Prompt

MAX_SHOWN = 2000
"""Maximum number of characters that are shown of a prompt."""
PROBE = 1536
"""Rows and columns of the matrices with which the machine is measured."""


def print_plan(config: RunConfig, *, resume: bool, checkpoint: Path | None = None) -> None:
    """Print the whole configuration as YAML, then the estimate as YAML comments, so that the output is a recipe.

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
    check_place(config)
    prepare_torch(config.device, config.threads)  # the measurements below are made in this process in any case
    inputs = check_recipe(config)
    info = describe_model(inputs.model_dir)
    size = ModelSize(
        parameters=info.parameters,
        layers=info.layers,
        hidden=info.hidden,
        intermediate=info.intermediate,
    )
    prompt_tokens = statistics.fmean(len(prompt.prompt_ids) for prompt in inputs.prompts.train)
    asyncio.run(_check_rewards(config, inputs.prompts.by_source))
    algorithm = make_algorithm(config.algorithm)
    scoring = {task.pool for task in algorithm.tasks if task.work == Score()}
    engines = {pool: make_backend(engine).size(info.parameters) for pool, engine in config.engines.items()}
    plan = estimate(config, size, engines, prompt_tokens, measure_machine(config), run_pools(config), scoring)
    print(write_yaml(shown(config.resolved)), end="")
    print(f"# model: {info.family}, {info.parameters / 1e6:.0f}M parameters, context {info.context_length}")
    print(f"# prompts: {len(inputs.prompts.train)} to train on ({prompt_tokens:.0f} tokens in the mean), ", end="")
    print(
        ", ".join(f"{len(prompts)} in {name}" for name, prompts in inputs.prompts.evaluated.items()) or "none held out"
    )
    for why, count in inputs.prompts.dropped.items():
        print(f"# {count} prompts are dropped: {why}")
    print("# one of them, as the model reads it:")
    for line in _shown(inputs.prompts.train[0].text):
        print(f"#   {line}")
    for line in _lines(config, algorithm, plan):
        print(f"# {line}")


async def _check_rewards(config: RunConfig, sources: Mapping[str, Sequence[Prompt]]) -> None:
    """Make the grader in a process of its own, as a run does, and check answers with it."""
    async with GraderPool(config.rewards.model_copy(update={"workers": 1})) as pool:
        await check_answers(config.rewards, sources, pool)


def _shown(text: str) -> list[str]:
    """Return the lines of a prompt in quotes, with special characters escaped; the middle of a long prompt is left
    out."""
    if len(text) > MAX_SHOWN:
        left_out = len(text) - MAX_SHOWN
        return [*_shown(text[: MAX_SHOWN // 2]), f"… {left_out:,} characters …", *_shown(text[-MAX_SHOWN // 2 :])]
    return [quoted(line, MAX_SHOWN + 2) for line in text.splitlines(keepends=True)]


def _lines(config: RunConfig, algorithm: Algorithm, plan: Estimate) -> list[str]:
    memory = ", ".join(f"{name} {size / GIB:.2f}" for name, size in plan.memory.items())
    where = " of all machines together" if config.cluster.address else ""
    lines = [f"memory: about {plan.total_memory / GIB:.1f} GiB{where} ({memory})"]
    if math.isfinite(plan.checkpoint_bytes):
        size = f"{plan.checkpoint_bytes / GIB:.1f} GiB"
        lines.append(f"disk: {size} a checkpoint, {config.checkpoint.keep} kept, one more on saving")
    lines += _time_lines(config, plan)
    times = {"engine": plan.rollout_s, "trainer": plan.actor_s}
    unknown = [part for part, seconds in times.items() if math.isnan(seconds)]
    unknown += [task.name for task, _ in algorithm.other_models()]
    if unknown:
        lines.append(f"what your {' and your '.join(unknown)} will take is not known, and not counted")
    return lines


def _time_lines(config: RunConfig, plan: Estimate) -> list[str]:
    shares = {"rollout": plan.rollout_s, "actor": plan.actor_s}
    known = {name: seconds for name, seconds in shares.items() if math.isfinite(seconds)}
    if not known:
        return []
    parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in known.items())
    bound = "most" if config.device == "cpu" else "least"  # launching the kernels of a GPU is not counted
    tokens = f"if every response is {config.sampling.max_new_tokens} tokens long"
    if len(known) < len(shares):
        return [f"time: at {bound} about {parts} s a step {tokens}"]
    parts += ", side by side" if plan.overlap else ""
    return [
        f"time: at {bound} about {plan.step_s:.1f} s a step ({parts}) {tokens}",
        f"time: {config.trainer.steps} steps in about {config.trainer.steps * plan.step_s / 60:.0f} min, "
        f"evaluations not counted",
    ]


def measure_machine(config: RunConfig) -> MachineSpeed:
    """Time a matrix product and a matrix-vector product in the trainer's precision, half a second in all."""
    dtype = torch.bfloat16 if config.trainer.precision == "bf16" else torch.float32
    matrix = torch.randn(PROBE, PROBE, device=config.device).to(dtype)
    large = torch.randn(16 * PROBE, PROBE, device=config.device).to(dtype)
    vector = torch.randn(PROBE, 1, device=config.device).to(dtype)
    product_s = _median_seconds(lambda: matrix @ matrix, matrix.device)
    read_s = _median_seconds(lambda: large @ vector, matrix.device)
    read = large.numel() * large.element_size()
    return MachineSpeed(flops=2 * PROBE**3 / product_s, bytes_per_s=read / read_s, threads=torch.get_num_threads())


def _median_seconds(work: Callable[[], object], device: torch.device, repeats: int = 7) -> float:
    def once() -> float:
        start = now(device)
        work()
        return now(device) - start

    once()
    return statistics.median(once() for _ in range(repeats))
