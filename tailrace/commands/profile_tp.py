"""`tailrace profile tp`: measures decode steps, prefills and switches under each TP degree, for engines with
`adaptive_tp`.

One engine, whose ranks go from degree to degree, first searches for the batch sizes at which steps bend, by bisection.
Then it measures everything in each of several rounds. It measures one batch size under all degrees before the next, so
a machine that slows down for a while does so for all of them:

    a short context ──all arrangements──▶ seconds of a step ──bends──▶ batch sizes

    each batch size ──each degree──▶ decode steps ──lower quartile over rounds──┐
    prefills        ──each degree──▶ seconds ──lower quartile over rounds───────┼──▶ TPProfile
    round trip      ──each pair of degrees──▶ weights, keys and values──medians─┘

With `engine.adaptive_tp.engines: N`, N - 1 more engines do the same at the same time, and the times of the first one
count. The method follows PAT, section 4.2 (Offline Profiler). Nothing is written before everything is measured.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

import tailrace
from tailrace.commands.files import check_new_file
from tailrace.commands.tp_tables import decode_table, prefill_line, prefill_table, switch_table, title
from tailrace.config.engine import AdaptiveTPConfig, NativeEngineConfig
from tailrace.config.generate import TPProfileConfig
from tailrace.engine.adaptive_tp.measure import Bench, MeasuredSwitch
from tailrace.engine.adaptive_tp.profile_key import default_path, profile_key
from tailrace.engine.adaptive_tp.profile_plan import Plan, Turn, make_plan
from tailrace.engine.arrangement import Arrangement
from tailrace.engine.model.weights import checkpoint_weights
from tailrace.engine.ranks.factory import stage
from tailrace.errors import UserError, counted
from tailrace.host.compute import prepare_torch
from tailrace.models.architecture import read_architecture
from tailrace.models.resolve import resolve_model
from tailrace.planning.bends import Sweeps, bends_of, measure_bends
from tailrace.planning.tp_profile import (
    DecodePoint,
    PrefillPoint,
    ProfileKey,
    SwitchCost,
    TPProfile,
    UnevenPoint,
    most_sizes,
)
from tailrace.planning.tp_verdict import SwitchReport
from tailrace.report.text import duration

LOG_PERIOD_S = 10.0
ALL_REDUCES = 100
"""Number of all-reduces that are timed after a switch."""
TOLERANCE = 0.02
"""Part of a step by which a line between two batch sizes may be off where a third was measured."""
SWEEPS, SWEEP_STEPS = 5, 4
"""Sweeps over all batch sizes that are tried, and steps of each size in a sweep."""
SEARCH_S = 60.0
MOST_SEARCHED = 64
"""Seconds, and batch sizes, after which no more sizes are tried. All are measured again with those that are."""


@dataclass(slots=True)
class Figures:
    """The measurements of all rounds so far, mostly in seconds."""

    decode: defaultdict[tuple[int, int, int, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    """Seconds of decode steps, by (TP, replicas, B, L)."""
    uneven: defaultdict[tuple[int, int, int], list[tuple[float, float]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    """Seconds of decode steps beside other batches, and beside equal ones, by (TP, B, B of the others)."""
    prefill: defaultdict[tuple[int, int, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    """Seconds of prefills, by (TP, B, L)."""
    switches: defaultdict[tuple[int, int], list[SwitchReport]] = field(default_factory=lambda: defaultdict(list))
    """Switches in the middle of a batch, by (source, target)."""
    group_s: dict[int, float] = field(default_factory=dict)
    """Seconds in which process groups were made, by degree; its groups are made once."""
    capture_s: defaultdict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Seconds of capture, by the degree that was switched to."""
    kv_bytes_per_s: defaultdict[tuple[int, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    """Bytes a second at which keys and values moved, by (source, target)."""
    all_reduces: defaultdict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Bytes a second of all-reduces, by TP."""

    warm: dict[int, int] = field(default_factory=dict)
    """Blocks of a replica's cache that were written before measurements, by degree."""

    def profile(self, key: ProfileKey, plan: Plan) -> TPProfile:
        """Return the profile. Steps and prefills take what they did in the quicker rounds, and switches the median."""
        return TPProfile(
            key=key,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            tailrace=tailrace.__version__,
            token_budget=plan.token_budget,
            decode=tuple(
                DecodePoint(
                    tp=tp,
                    replicas=replicas,
                    batch_size=size,
                    context_tokens=size * length,
                    seconds=undisturbed(seconds),
                )
                for (tp, replicas, size, length), seconds in sorted(self.decode.items())
            ),
            prefill=tuple(
                PrefillPoint(tp=tp, batch_size=size, length=length, seconds=undisturbed(seconds))
                for (tp, size, length), seconds in sorted(self.prefill.items())
            ),
            uneven=tuple(
                UnevenPoint(tp=tp, batch_size=size, others=others, seconds=uneven, even_s=even)
                for (tp, size, others), pairs in sorted(self.uneven.items())
                for uneven, even in [sorted(pairs, key=lambda pair: pair[0] / pair[1])[len(pairs) // 2]]
            ),
            switches=tuple(
                SwitchCost(
                    source_tp=source,
                    target_tp=target,
                    reshard_s=statistics.median(switch.weights_s for switch in switches),
                    rest_s=statistics.median(switch.rest_s for switch in switches),
                    kv_bytes_per_s=statistics.median(self.kv_bytes_per_s[source, target]),
                )
                for (source, target), switches in sorted(self.switches.items())
            ),
            group_s=self._group_s(plan),
            capture_s={tp: statistics.median(seconds) for tp, seconds in sorted(self.capture_s.items())},
            collective_bytes_per_s={tp: statistics.median(rates) for tp, rates in sorted(self.all_reduces.items())},
        )

    def _group_s(self, plan: Plan) -> dict[int, float]:
        """Return the seconds for each degree's groups. For groups that came with the ranks, the longest time of the
        others counts."""
        longest = max(self.group_s.values(), default=0.0)
        return {degree: longest for degree in plan.degrees if degree > 1} | self.group_s


def profile_tp(config: TPProfileConfig, *, force: bool = False) -> None:
    """Measure, write the profile and print it as tables; `force` replaces an existing file.

    Raises:
        UserError: the model cannot be split so, the cache has no room for the measurements, or the file exists or
            cannot be written.
        EngineError: a rank died, or memory has no room for a switch.
    """
    if config.file is not None:
        option = "engine.adaptive_tp.profile" if config.output is None else "output"
        check_new_file(option, Path(config.file), force=force)
    prepare_torch(config.device, config.threads)
    model_dir, device = resolve_model(config.model), torch.device(config.device)
    architecture = read_architecture(model_dir)
    key = profile_key(config.engine, architecture, model=model_dir.name, device=device)
    path = default_path(key) if config.file is None else Path(config.file)
    if path.exists() and not force:
        raise UserError(f"{path} exists; measure again with --force, or give another file as output")
    plan = make_plan(config, architecture)
    engine = _engine(config, plan)
    with ExitStack() as stack:
        arrangement, *beside = (
            stack.enter_context(closing(Arrangement(engine, architecture, device=device))) for _ in range(key.engines)
        )
        weights = stage(checkpoint_weights(architecture, model_dir), engine)
        for each in (arrangement, *beside):
            each.load(weights, recompute=False)
        bench = Bench(arrangement, architecture, seed=config.seed, beside=beside)
        figures, console = Figures(), Console(stderr=True)
        sizes = search(bench, plan, figures, console, most=most_sizes(config.points))
        profile = measure(bench, make_plan(config, architecture, sizes=sizes), figures, key, console)
    profile.write(path)
    show(profile, Console(highlight=False))
    print(path)


def search(bench: Bench, plan: Plan, figures: Figures, console: Console, *, most: int) -> list[int]:
    """Return the batch sizes, at most `most`, between which steps go by straight lines under all arrangements.

    Raises:
        EngineError: see `profile_tp`.
    """
    ends_at = time.perf_counter() + SEARCH_S
    with _Steps.shown(None, console) as done:

        def sweeps_of(sizes: Sequence[int]) -> Mapping[int, Sweeps]:
            found: dict[int, list[list[float]]] = {size: [[] for _ in range(SWEEPS)] for size in sizes}
            for tp in plan.walk(bench.tp):
                if tp != bench.tp:
                    _switch(bench, tp, figures)
                _warm_up(bench, plan, figures)
                for sweep in range(SWEEPS):
                    for size in sizes[:: -1 if sweep % 2 else 1]:
                        found[size][sweep] += [
                            bench.decode_s(replicas, size, plan.length, steps=SWEEP_STEPS)
                            for replicas in plan.replicas(tp)
                        ]
                        done.count(f"searching for bends · TP {tp}, decoding {size} × {plan.length}")
            return found

        found = measure_bends(
            sweeps_of,
            plan.largest,
            tolerance=TOLERANCE,
            most=MOST_SEARCHED,
            goes_on=lambda: time.perf_counter() < ends_at,
        )
    return bends_of(found, tolerance=TOLERANCE, most=most)


def measure(bench: Bench, plan: Plan, figures: Figures, key: ProfileKey, console: Console) -> TPProfile:
    """Measure all rounds, and show the progress on `console`.

    Raises:
        EngineError: see `profile_tp`.
    """
    with _Steps.shown(plan.measurements, console) as done:
        for index in range(plan.rounds):
            done.turn = f"round {index + 1} of {plan.rounds} · "
            _measure_round(bench, plan, figures, done)
    return figures.profile(key, plan)


def _measure_round(bench: Bench, plan: Plan, figures: Figures, done: "_Steps") -> None:
    for turn in plan.turns:
        for tp in plan.walk(bench.tp):
            if tp != bench.tp:
                _switch(bench, tp, figures)
            _measure_points(bench, plan, turn, figures, done)
    walk = round_trip([bench.tp, *(tp for tp in plan.degrees if tp != bench.tp)])
    bench.hold(*plan.held)
    bench.step()
    for source, target in pairwise(walk):
        report, sent_bytes = _switch(bench, target, figures)
        figures.switches[source, target].append(report)
        figures.kv_bytes_per_s[source, target].append(sent_bytes / report.kv_s)
        # as in the middle of a batch, these steps leave little of what moves next in the processor's caches
        first_s, second_s = bench.step(), bench.step()
        figures.capture_s[target].append(max(0.0, first_s - second_s))
        if target > 1:
            figures.all_reduces[target].append(bench.all_reduce_bytes_per_s(plan.decode[-1][0], times=ALL_REDUCES))
        done.count(f"TP {source} to {target}")
    bench.clear()


def _switch(bench: Bench, tp: int, figures: Figures) -> MeasuredSwitch:
    """Change the degree, and record the groups that were made for it."""
    switch = bench.switch(tp)
    made = switch.report.made_groups
    figures.group_s |= {degree: switch.report.groups_s / len(made) for degree in made}
    return switch


def _warm_up(bench: Bench, plan: Plan, figures: Figures) -> None:
    """Prepare the present arrangement where it is measured for the first time, or with more cache than before."""
    if figures.warm.get(bench.tp, 0) < plan.blocks:
        figures.warm[bench.tp] = plan.blocks
        bench.write_cache(plan.blocks)
        bench.decode_s(max(plan.replicas(bench.tp)), *plan.decode[-1], steps=1)


def _measure_points(bench: Bench, plan: Plan, turn: Turn, figures: Figures, done: "_Steps") -> None:
    """Measure points under the present arrangement."""
    tp = bench.tp
    _warm_up(bench, plan, figures)
    for size, length in turn.decode:
        for replicas in plan.replicas(tp):
            seconds = bench.decode_s(replicas, size, length, steps=plan.steps)
            figures.decode[tp, replicas, size, length].append(seconds)
            done.count(f"TP {tp}, decoding {size} × {length}")
    for size, length in turn.prefill:
        figures.prefill[tp, size, length].append(bench.prefill_s(size, length))
        done.count(f"TP {tp}, prefilling {size} × {length}")
    replicas = max(plan.replicas(tp))
    for size, others in turn.uneven if replicas > 1 else ():
        uneven, even = (
            bench.decode_s(replicas, size, plan.uneven_length, steps=plan.steps, others=beside)
            for beside in (others, None)
        )
        figures.uneven[tp, size, others].append((uneven, even))
        done.count(f"TP {tp}, decoding {size} beside {others}")


def undisturbed(seconds: Sequence[float]) -> float:
    """The lower quartile of some measurements: what a neighbour takes of a machine comes and goes, and only adds."""
    return sorted(seconds)[(len(seconds) - 1) // 4]


def round_trip(degrees: Sequence[int]) -> list[int]:
    """Return a walk from the first degree back to it on which each degree follows each other one once."""
    first, *others = degrees
    walk = [first]
    for index, other in enumerate(others):
        walk += [*(round_trip(others) if index == 0 else [other]), first]
    return walk


def _engine(config: TPProfileConfig, plan: Plan) -> NativeEngineConfig:
    """Arrange the engine for the first degree. Its groups are the fewest of all, and are made with the ranks."""
    adaptive_tp = AdaptiveTPConfig(degrees=plan.degrees, engines=config.engine.engines_here)
    first = plan.degrees[0]
    return config.engine.model_copy(update={"dp": plan.ranks // first, "tp": first, "adaptive_tp": adaptive_tp})


class _Steps:
    """The progress of the measurements: a bar in a terminal, a line now and then in a log.

    It draws between two measurements only, since drawing would disturb them.
    """

    def __init__(self, total: int | None, console: Console, progress: Progress) -> None:
        """`total`: the number of measurements; None where that is not known."""
        self.turn = ""
        """What every measurement is told with."""
        self._total = total
        self._console = console
        self._progress = progress
        self._bar = progress.add_task("", total=total)
        self._done = 0
        self._began = self._logged = time.perf_counter()

    @classmethod
    @contextmanager
    def shown(cls, total: int | None, console: Console) -> Iterator["_Steps"]:
        columns = (
            SpinnerColumn(),
            MofNCompleteColumn(),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
        )
        with Progress(
            *columns, console=console, transient=True, auto_refresh=False, disable=not console.is_interactive
        ) as progress:
            yield cls(total, console, progress)

    def count(self, what: str) -> None:
        """Count a measurement that is done."""
        self._done += 1
        text = f"{self.turn}{what}"
        self._progress.update(self._bar, completed=self._done, description=text, refresh=True)
        now = time.perf_counter()
        if not self._console.is_interactive and now - self._logged >= LOG_PERIOD_S:
            self._logged = now
            of = f"{self._done}/" if self._total else ""
            part = f"{of}{counted(self._total or self._done, 'measurement')}"
            line = f"{part} · {duration(now - self._began)} · {text}"
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def show(profile: TPProfile, console: Console) -> None:
    """Print the profile, for people."""
    console.print(title(profile.key), style="bold", soft_wrap=True, markup=False)
    for shown in (decode_table(profile), prefill_table(profile), prefill_line(profile), switch_table(profile)):
        console.print(shown)
        console.print()
