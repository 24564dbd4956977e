"""The figures of a benchmark for people."""

from collections.abc import Sequence
from typing import cast

from rich.console import Console
from rich.table import Table

from tailrace.bench.compare import Comparison
from tailrace.bench.figures import STAGES
from tailrace.bench.setup import Setup
from tailrace.bench.single import Result
from tailrace.errors import counted
from tailrace.registers.phases import PHASES, Phase
from tailrace.report.tables import figures_table
from tailrace.report.text import number, percent
from tailrace.report.workers import STATE_TITLES

_LEAST = 0.01
"""Phases that take less of a worker's time are left out."""


def print_result(result: Result) -> None:
    """Print a line on what was played, the whole, each step, and each worker."""
    console = Console()
    played = f"{counted(result.samples, 'sample')}, {result.response_tokens:,} response tokens"
    cut = f", {counted(result.cut, 'response')} cut off at {result.limit:,}" if result.cut else ""
    warm_up = f"; warm-up: {counted(result.warm_up, 'step')}" if result.warm_up else ""
    console.print(f"{result.workload}: {played}{cut}{warm_up}", highlight=False, soft_wrap=True)
    for table in (_whole(result), _steps(result), _workers(result), _phases(result)):
        if table.row_count:
            console.print()
            console.print(table)


def print_setup(setup: Setup) -> None:
    """Print what would be played."""
    table = figures_table(setup.workload, "")
    samples, config = setup.trace.samples, setup.config
    table.add_row("steps", f"{config.trainer.steps:,}")
    table.add_row("groups a step", f"{config.groups_per_step:,}")
    table.add_row("samples of a group", f"{config.algorithm.group_size:,}")
    for title, column in (("prompt tokens", "prompt_tokens"), ("response tokens", "response_tokens")):
        lengths = samples[column].to_numpy()
        table.add_row(f"{title}, mean", number(lengths.mean()))
        table.add_row(f"{title}, most", f"{lengths.max():,}")
    table.add_row("responses cut off", f"{setup.cut:,}")
    table.add_row("devices", f"{setup.devices:,}")
    Console().print(table)


def print_comparison(comparisons: Sequence[Comparison], names: tuple[str, str]) -> None:
    """Print what A and B are, and a row for each figure."""
    console = Console()
    for arm, name in zip("AB", names, strict=True):
        console.print(f"{arm}: {name or 'as given'}", highlight=False, markup=False, soft_wrap=True)
    console.print()
    table = figures_table("", "A", "B", "B / A", "95 % interval")
    for one in comparisons:
        interval = "" if one.interval is None else f"{one.interval[0]:.3f} to {one.interval[1]:.3f}"
        table.add_row(one.name, number(one.a), number(one.b), f"{one.ratio:.3f}", interval)
    console.print(table)
    if any(one.interval is None for one in comparisons):
        console.print("\nAn interval takes two rounds or more.", highlight=False)


def _whole(result: Result) -> Table:
    figures = result.figures
    table = figures_table("after the warm-up" if result.warm_up else "all steps", "")
    table.add_row("seconds", number(figures.seconds))
    table.add_row("seconds a step", number(figures.step_s))
    table.add_row("samples a second", number(figures.samples_per_s))
    table.add_row("response tokens a second", number(figures.tokens_per_s))
    table.add_row("response tokens a second and device", number(figures.tokens_per_s_device))
    if figures.training_tokens_per_s is not None:
        table.add_row("response tokens a second of updates", number(figures.training_tokens_per_s))
    table.add_row("tail: generation after 90 % of a step's samples", percent(figures.tail_share))
    return table


def _steps(result: Result) -> Table:
    steps = result.figures.steps
    stages = [stage for stage in STAGES if any(step.stages[stage] for step in steps)]
    table = figures_table("step", "seconds", *stages, "tokens", "tail")
    for step in steps:
        seconds = (number(step.stages[stage]) for stage in stages)
        tail = percent(step.tail_share)
        table.add_row(str(step.step + 1), number(step.seconds), *seconds, f"{step.response_tokens:,}", tail)
    return table


def _workers(result: Result) -> Table:
    table = figures_table("worker", *STATE_TITLES.values(), "peak memory")
    for worker in result.figures.workers:
        memory = "" if worker.peak_memory_gib is None else f"{worker.peak_memory_gib:.2f} GiB"
        shares = (percent(worker.shares[state]) if worker.shares else "" for state in STATE_TITLES)
        table.add_row(worker.worker, *shares, memory)
    return table


def _phases(result: Result) -> Table:
    """The phases that take a percent of a worker's time or more, with their parts. States are in the table before."""
    table = figures_table("worker", "phase", "of its time")
    table.columns[1].justify = "left"
    for worker in result.figures.workers:
        for phase, share in worker.phases.items():
            if share < _LEAST or phase in STATE_TITLES:  # the table of states has it
                continue
            table.add_row(worker.worker, PHASES[cast(Phase, phase)].title, percent(share))
            parts = worker.parts.get(phase, {}).items()
            for part, of_part in sorted(parts, key=lambda item: -item[1]):
                table.add_row("", f"  {part}", percent(of_part))
    return table
