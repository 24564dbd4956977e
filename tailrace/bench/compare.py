"""Two configurations of a benchmark in turns: A B, B A, A B, … so that a drift of the machine meets both alike.

Each turn is a process of its own. The ratio of a figure, B over A, has a 95 % interval of Student's t over the
logarithms of the ratios of the pairs.
"""

import math
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec

from tailrace.bench.single import Interrupted, Result, words
from tailrace.errors import BenchError, UserError
from tailrace.host.interrupt import INTERRUPTED
from tailrace.host.run_child import run_child
from tailrace.registers import run_files

LEVEL = 0.95

COMPARED: Mapping[str, Callable[[Result], float | None]] = {
    "seconds a step": lambda result: result.figures.step_s,
    "response tokens a second": lambda result: result.figures.tokens_per_s,
    "response tokens a second and device": lambda result: result.figures.tokens_per_s_device,
    "seconds of generation a step": lambda result: result.figures.stages["generation"],
    "seconds of update a step": lambda result: result.figures.stages["update"],
    "training tokens a second": lambda result: result.figures.training_tokens_per_s,
    "tail share": lambda result: result.figures.tail_share,
}
"""The figures that are compared. A figure that is None or 0 in any result is left out."""


_OF_BOTH = ("--compare", "--rounds", "--dry-run", "--json", "--help")
"""Options that no configuration can have of its own. One that follows a single configuration would be taken for B."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One figure of both."""

    name: str
    a: float
    """Median."""
    b: float
    ratio: float
    """B over A: the geometric mean over the pairs."""
    interval: tuple[float, float] | None
    """Of the ratio; None for a single pair."""


def process_turn(arguments: Sequence[str], output_dir: Path) -> Result:
    """Run a benchmark in a process of its own. Its output is on standard error.

    Raises:
        BenchError: it has failed.
        Interrupted: Ctrl-C has ended it.
    """
    print(f"{output_dir.name}: tailrace bench {shlex.join(arguments)}", file=sys.stderr, flush=True)
    if code := _run([*arguments, f"output_dir={output_dir}"]):
        raise BenchError(f"the turn {output_dir.name} ended with exit code {code}; see its output above")
    return msgspec.json.decode((output_dir / run_files.BENCH).read_bytes(), type=Result)


def check_arguments(arguments: Sequence[str], *, shown: bool = False) -> None:
    """Check in a process of its own that a benchmark can begin; its message is on standard error.

    `shown`: print what would be played.

    Raises:
        BenchError: it cannot begin.
        Interrupted: Ctrl-C has ended the check.
    """
    if _run([*arguments, "--dry-run"], stdout=sys.stdout if shown else subprocess.DEVNULL):
        raise BenchError(f"tailrace bench {shlex.join(arguments)} cannot begin; see its message above")


def _run(arguments: Sequence[str], *, stdout: IO[str] | int = subprocess.DEVNULL) -> int:
    try:
        code = run_child([sys.executable, "-m", "tailrace", "bench", *arguments], stdout=stdout)
    except KeyboardInterrupt:
        raise Interrupted from None
    if code == INTERRUPTED:
        raise Interrupted
    return code


Pair = tuple[Result, Result]
"""The results of A and B in one round."""


def both_arguments(common: Sequence[str], arms: tuple[str, str]) -> tuple[list[str], list[str]]:
    """The arguments of A and of B.

    Args:
        common: arguments of `tailrace bench` for both.
        arms: further arguments of each, as one would type them.

    Raises:
        UserError: a quotation of `arms` is not closed, or one of them is an option of the comparison itself.
    """
    a, b = (words("--compare", arm) for arm in arms)
    for word in (*a, *b):
        if word in _OF_BOTH:
            raise UserError(f"--compare was given {word} as a configuration; give it two, such as '' 'trainer.lr=1e-6'")
    return [*common, *a], [*common, *b]


def run_turns(
    both: tuple[Sequence[str], Sequence[str]],
    directory: Path,
    rounds: int,
    *,
    turn: Callable[[Sequence[str], Path], Result] = process_turn,
) -> list[Pair]:
    """Run both in turns. Returns the results of A and B of each round.

    Args:
        both: the arguments of `tailrace bench` of each.
        directory: gets a run for each turn.
        rounds: the number of pairs.
        turn: runs a benchmark with these arguments in the directory that it gets.

    Raises:
        BenchError: a turn has failed.
        Interrupted: Ctrl-C has ended one.
    """
    pairs = []
    for number in range(rounds):
        order = (0, 1) if number % 2 == 0 else (1, 0)
        results = {arm: turn(both[arm], directory / f"{'AB'[arm]}-{number}") for arm in order}
        pairs.append((results[0], results[1]))
    return pairs


def comparisons(pairs: Sequence[Pair]) -> list[Comparison]:
    """Compare the figures that all results have."""
    compared = []
    for name, figure in COMPARED.items():
        values = [(figure(a), figure(b)) for a, b in pairs]
        known = [(a, b) for a, b in values if a and b]
        if len(known) == len(pairs):
            compared.append(_comparison(name, known))
    return compared


def _comparison(name: str, values: Sequence[tuple[float, float]]) -> Comparison:
    ratios = [math.log(b / a) for a, b in values]
    return Comparison(
        name=name,
        a=statistics.median(a for a, _ in values),
        b=statistics.median(b for _, b in values),
        ratio=math.exp(statistics.fmean(ratios)),
        interval=_interval(ratios),
    )


def _interval(logarithms: Sequence[float]) -> tuple[float, float] | None:
    if len(logarithms) < 2:
        return None
    from scipy.stats import t as student

    mean, count = statistics.fmean(logarithms), len(logarithms)
    half = float(student.ppf((1 + LEVEL) / 2, count - 1)) * statistics.stdev(logarithms) / math.sqrt(count)
    return math.exp(mean - half), math.exp(mean + half)
