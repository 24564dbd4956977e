"""One benchmark: a run that plays a workload, in a directory of its own, with `bench.json` at its end."""

import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from tailrace.bench.figures import Figures, check_steps, figures_of
from tailrace.bench.jobs import check_played, write_jobs
from tailrace.bench.setup import Setup
from tailrace.config.run import RunConfig
from tailrace.errors import BenchError, UserError, one_line
from tailrace.events import Event
from tailrace.host.allocator import KEPT_MEMORY
from tailrace.host.compute import prepare_torch
from tailrace.host.run_child import run_child
from tailrace.registers import run_files
from tailrace.report.page import write_report
from tailrace.report.run_data import load_run, write_file
from tailrace.run.checks import check_place, check_recipe
from tailrace.run.directory import RunDirectory
from tailrace.run.inputs import load_inputs
from tailrace.run.train import train
from tailrace.types import Prompt
from tailrace.workloads.files import parquet_of


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one benchmark."""

    workload: str
    system: str
    """tailrace, or the command of an adapter."""
    samples: int
    prompt_tokens: int
    """In all samples together, those of the warm-up among them."""
    response_tokens: int
    longest_response: int
    """In tokens, those of tools among them."""
    limit: int
    """`sampling.max_new_tokens` of the recipe."""
    cut: int
    """Responses that were cut off at it."""
    warm_up: int
    figures: Figures


class Interrupted(Exception):
    """Ctrl-C has ended the run."""


def check_single(setup: Setup, *, warm_up: int, adapter: str | None = None) -> None:
    """Check that `run_single` can begin. Nothing is left of the check.

    Raises:
        UserError: it cannot.
    """
    check_steps(setup.config.trainer.steps, warm_up)
    command = _command(adapter)
    directory = RunDirectory(Path(setup.config.output_dir))
    directory.check_new()
    directory.check_makeable()
    with TemporaryDirectory() as folder:
        trace = Path(folder) / Path(run_files.PLAYED_TRACE).name
        trace.write_bytes(parquet_of(setup.trace))
        if command is None:
            check_place(setup.config)
            check_recipe(setup.reading(trace))
        else:
            _adapter_prompts(setup.reading(trace))


def run_single(setup: Setup, *, warm_up: int, adapter: str | None = None, adapter_timeout_s: float = 3600.0) -> Result:
    """Play a workload and work out the figures. The run's directory keeps events, report and figures, but no weights.

    Args:
        setup: what is played, and by which run.
        warm_up: steps that do not count.
        adapter: the command that plays it in place of Tailrace; see `tailrace.bench.jobs`.
        adapter_timeout_s: seconds that the command may take.

    Raises:
        UserError: the run cannot begin as configured. Nothing is left then.
        BenchError: the adapter has failed, or a response is not as long as asked for.
        Interrupted: Ctrl-C has ended it.
        TailraceError: the run has failed.
    """
    check_steps(setup.config.trainer.steps, warm_up)
    command = _command(adapter)
    directory = RunDirectory(Path(setup.config.output_dir))
    if command is None:
        _train(setup)
    else:
        with directory.locked():
            directory.check_new()
            with directory.holding(parquet_of(setup.trace), run_files.PLAYED_TRACE):
                _adapted(setup, directory, command, adapter_timeout_s)
    events = load_run(directory.path).events  # of the last attempt alone, where a worker's death began another
    check_played(events, setup)
    result = _result(setup, events, warm_up, adapter)
    write_file(directory.path, run_files.BENCH, msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    if command is not None:  # a run of Tailrace has written its own
        write_report(directory.path)
    return result


def words(option: str, text: str) -> list[str]:
    """Split what an option was given as a shell does.

    Raises:
        UserError: a quotation is not closed.
    """
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UserError(f"{option} was given {text!r}: {one_line(error)}; quote it as in a shell") from None


def _command(adapter: str | None) -> list[str] | None:
    """The words of the adapter's command, whose program is there."""
    if adapter is None:
        return None
    command = words("--adapter", adapter)
    if not command:
        raise UserError("--adapter is empty; give a command")
    if shutil.which(command[0]) is None:
        raise UserError(f"--adapter begins with {command[0]!r}, which is no program here; give a command")
    return command


def _train(setup: Setup) -> None:
    with redirect_stdout(sys.stderr):  # standard output is for the figures
        code = train(setup.config, resume=False, played=parquet_of(setup.trace))
    if code:
        raise Interrupted


def _adapted(setup: Setup, directory: RunDirectory, command: Sequence[str], timeout_s: float) -> None:
    adapter, whole = shlex.join(command), [*command, str(directory.path)]
    write_jobs(setup, _adapter_prompts(setup.config), directory.path / run_files.JOBS)
    try:
        code = run_child(whole, stdout=sys.stderr, limit_s=timeout_s, environment=KEPT_MEMORY)
    except KeyboardInterrupt:
        raise Interrupted from None
    except OSError as error:
        raise BenchError(f"the adapter {adapter!r} cannot be started: {one_line(error)}") from None
    except subprocess.TimeoutExpired:
        raise BenchError(
            f"the adapter {adapter!r} has not ended within {timeout_s:g} s; raise --adapter-timeout"
        ) from None
    if code:
        raise BenchError(f"the adapter {adapter!r} ended with exit code {code}; see its output above")
    if not directory.events.is_file():
        raise BenchError(f"the adapter {adapter!r} left no {directory.events}; see docs/workloads.md for what it holds")


def _adapter_prompts(config: RunConfig) -> Sequence[Prompt]:
    """The prompts of a run that an adapter plays, which are checked as those of Tailrace's own."""
    prepare_torch(config.device, config.threads)
    return load_inputs(config).prompts.train


def _result(setup: Setup, events: Sequence[Event], warm_up: int, adapter: str | None) -> Result:
    samples = setup.trace.samples
    return Result(
        workload=setup.workload,
        system=adapter or "tailrace",
        samples=len(samples),
        prompt_tokens=int(samples["prompt_tokens"].sum()),
        response_tokens=int(samples["response_tokens"].sum()),
        longest_response=setup.config.sampling.max_new_tokens,
        limit=setup.limit,
        cut=setup.cut,
        warm_up=warm_up,
        figures=figures_of(events, warm_up=warm_up, devices=setup.devices),
    )
