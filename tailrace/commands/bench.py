"""`tailrace bench`: plays a workload with a whole run, and prints where the time went."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tailrace.bench.compare import compare as compared
from tailrace.bench.compare import run_turns
from tailrace.bench.figures import check_steps
from tailrace.bench.setup import make_setup
from tailrace.bench.single import Interrupted, run_single
from tailrace.bench.tables import print_comparison, print_result, print_setup
from tailrace.config.load import load_config
from tailrace.errors import UserError
from tailrace.host.interrupt import INTERRUPTED

RECIPE = "bench"
"""The recipe where none is given."""


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
    rounds: int = 3,
    as_json: bool = False,
) -> int:
    """Run one benchmark, or two in turns, and print the figures. Returns the exit code: 0, or 130 when interrupted.

    Args:
        workload: see `make_setup`.
        arguments: a recipe, and changes to it.
        options: see there.
        compare: further arguments of two configurations.
        rounds: the number of pairs that are compared.
        as_json: print one JSON object.

    Raises:
        TailraceError: see `run_single` and `run_turns`.
    """
    if compare is not None:
        return _compared(workload, arguments, options, compare, rounds, as_json=as_json)
    recipe, overrides = _split(arguments)
    setup = make_setup(
        workload,
        recipe,
        overrides,
        seed=options.seed,
        scale=options.scale,
        resample=options.resample,
        random_weights=options.random_weights,
    )
    if options.dry_run:
        check_steps(setup.config.trainer.steps, options.warm_up)
        print_setup(setup)
        return 0
    try:
        result = run_single(
            setup,
            warm_up=options.warm_up,
            adapter=options.adapter,
            adapter_timeout_s=options.adapter_timeout_s,
        )
    except Interrupted:
        return INTERRUPTED
    if as_json:
        print(msgspec.json.encode(result).decode())
    else:
        print_result(result)
    return 0


def _split(arguments: Sequence[str]) -> tuple[Path, list[str]]:
    """Separate the recipe from the changes."""
    recipes = [argument for argument in arguments if "=" not in argument]
    if len(recipes) > 1:
        raise UserError(f"{recipes[1]!r} is a second recipe beside {recipes[0]!r}; a change is KEY=VALUE")
    return Path(recipes[0] if recipes else RECIPE), [argument for argument in arguments if "=" in argument]


def _compared(
    workload: str,
    arguments: Sequence[str],
    options: Options,
    arms: tuple[str, str],
    rounds: int,
    *,
    as_json: bool,
) -> int:
    recipe, overrides = _split(arguments)
    directory = Path(load_config(recipe, overrides).output_dir)
    if directory.exists():
        raise UserError(f"output_dir {directory} exists; choose another output_dir for the turns of --compare")
    common = [workload, *arguments, *options.arguments()]
    try:
        pairs = run_turns(common, arms, directory, rounds)
    except Interrupted:
        return INTERRUPTED
    comparisons = compared(pairs)
    if as_json:
        print(msgspec.json.encode(comparisons).decode())
    else:
        print_comparison(comparisons, arms)
    return 0
