"""`tailrace bench`: plays a workload with a whole run, and prints where the time went."""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from tailrace.bench.compare import both_arguments, check_arguments, comparisons, run_turns
from tailrace.bench.setup import Setup, load_sized, make_setup
from tailrace.bench.single import Interrupted, check_single, run_single
from tailrace.bench.tables import print_comparison, print_result, print_setup
from tailrace.errors import UserError
from tailrace.host.interrupt import INTERRUPTED
from tailrace.models.random import random_model, weightless_model

RECIPE = "bench"
"""The recipe where none is given."""
ROUNDS = 3
"""The pairs of a comparison where no number is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a benchmark is asked for beside its recipe; see `make_setup` and `run_single`."""

    warm_up: int
    scale: float
    seed: int
    resample: bool
    random_weights: bool
    adapter: str | None
    adapter_timeout_s: float
    dry_run: bool = False

    def arguments(self) -> list[str]:
        """The options as arguments of the command."""
        flags = {"--resample": self.resample, "--random-weights": self.random_weights}
        adapter = [] if self.adapter is None else ["--adapter", self.adapter]
        return [
            *("--warm-up", str(self.warm_up)),
            *("--scale", str(self.scale)),
            *("--seed", str(self.seed)),
            *("--adapter-timeout", str(self.adapter_timeout_s)),
            *(flag for flag, given in flags.items() if given),
            *adapter,
        ]


def bench(
    workload: str,
    arguments: Sequence[str],
    options: Options,
    *,
    compare: tuple[str, str] | None = None,
    rounds: int | None = None,
    as_json: bool = False,
) -> int:
    """Run one benchmark, or two in turns, and print the figures. Returns the exit code: 0, or 130 when interrupted.

    Args:
        workload: see `make_setup`.
        arguments: a recipe, and changes to it.
        options: see there. With `dry_run` it is only checked, and its set-up is printed.
        compare: further arguments of two configurations.
        rounds: the number of pairs that are compared; see `ROUNDS`.
        as_json: print one JSON object.

    Raises:
        TailraceError: see `run_single` and `run_turns`.
    """
    if options.dry_run and as_json:
        raise UserError("--dry-run measures nothing, and --json prints what is measured; leave out one of them")
    if rounds is not None and compare is None:
        raise UserError("--rounds is the number of pairs of --compare, which is missing; add it, or leave --rounds out")
    try:
        if compare is not None:
            return _compare(workload, arguments, options, compare, rounds or ROUNDS, as_json=as_json)
        if options.dry_run:
            return _check(workload, arguments, options)
        return _run(workload, arguments, options, as_json=as_json)
    except Interrupted:
        return INTERRUPTED


def _run(workload: str, arguments: Sequence[str], options: Options, *, as_json: bool) -> int:
    setup = _setup(workload, arguments, options, random_model)
    result = run_single(
        setup, warm_up=options.warm_up, adapter=options.adapter, adapter_timeout_s=options.adapter_timeout_s
    )
    if as_json:
        print(msgspec.json.encode(result).decode())
    else:
        print_result(result)
    return 0


def _check(workload: str, arguments: Sequence[str], options: Options) -> int:
    with TemporaryDirectory() as folder:
        setup = _setup(workload, arguments, options, partial(weightless_model, directory=Path(folder)))
        check_single(setup, warm_up=options.warm_up, adapter=options.adapter)
    print_setup(setup)
    return 0


def _setup(workload: str, arguments: Sequence[str], options: Options, weights: Callable[[Path], Path]) -> Setup:
    """`weights`: makes the model, where its weights are to be random."""
    recipe, overrides = _split(arguments)
    return make_setup(
        workload,
        recipe,
        overrides,
        seed=options.seed,
        scale=options.scale,
        resample=options.resample,
        weights=weights if options.random_weights else None,
    )


def _split(arguments: Sequence[str]) -> tuple[Path, list[str]]:
    """Separate the recipe from the changes."""
    recipes = [argument for argument in arguments if "=" not in argument]
    if len(recipes) > 1:
        raise UserError(f"{recipes[1]!r} is a second recipe beside {recipes[0]!r}; a change is KEY=VALUE")
    return Path(recipes[0] if recipes else RECIPE), [argument for argument in arguments if "=" in argument]


def _compare(
    workload: str,
    arguments: Sequence[str],
    options: Options,
    arms: tuple[str, str],
    rounds: int,
    *,
    as_json: bool,
) -> int:
    recipe, overrides = _split(arguments)
    config, _ = load_sized(workload, recipe, overrides, resample=options.resample)
    directory = Path(config.output_dir)
    if directory.exists():
        raise UserError(f"output_dir {directory} exists; choose another output_dir for the turns of --compare")
    both = both_arguments([workload, *arguments, *options.arguments()], arms)
    for name, arm in zip("AB", both, strict=True):  # what is wrong in B would otherwise show after the first turn of A
        if options.dry_run:
            print(f"{name}: tailrace bench {shlex.join(arm)}", flush=True)
        check_arguments(arm, shown=options.dry_run)
    if options.dry_run:
        return 0
    compared = comparisons(run_turns(both, directory, rounds))
    if as_json:
        print(msgspec.json.encode(compared).decode())
    else:
        print_comparison(compared, arms)
    return 0
