"""`tailrace profile tp`: what decode steps, prefills and switches take under each TP degree, for engines with
`adaptive_tp`.

One engine, whose ranks go from degree to degree, measures everything in each of several rounds, and one batch size
under all degrees before the next. So a machine that slows down for a while does so to all of them:

    each batch size ──each degree──▶ decode steps ────────────────────────┐
    prefills        ──each degree──▶ seconds ─────────────────────────────┼──medians over rounds──▶ TPProfile
    round trip      ──each pair of degrees──▶ weights, keys and values ───┘

After PAT, section 4.2 (Offline Profiler). Nothing is written before all is measured.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

import tailrace
from tailrace.commands.files import check_new_file
from tailrace.commands.tp_tables import decode_table, prefill_table, switch_table, title
from tailrace.config.engine import AdaptiveTPConfig, NativeEngineConfig
from tailrace.config.generate import TPProfileConfig
from tailrace.engine.adaptive_tp.measure import Bench, MeasuredSwitch
from tailrace.engine.adaptive_tp.profile_key import default_path, profile_key
from tailrace.engine.adaptive_tp.profile_plan import Plan, Points, make_plan
from tailrace.engine.arrangement import Arrangement
from tailrace.engine.model.weights import checkpoint_weights
from tailrace.engine.ranks.factory import stage
from tailrace.engine.ranks.switch import SwitchReport
from tailrace.errors import UserError
from tailrace.host.compute import prepare_torch
from tailrace.models.architecture import read_architecture
from tailrace.models.resolve import resolve_model
from tailrace.planning.tp_profile import DecodePoint, PrefillPoint, ProfileKey, SwitchCost, TPProfile
from tailrace.report.text import counted, duration

LOG_PERIOD_S = 10.0
ALL_REDUCES = 100
"""After a switch."""


@dataclass(slots=True)
class Figures:
    """Seconds of each measurement, of all rounds so far."""

    decode: defaultdict[tuple[int, int, int, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    """By (TP, replicas, B, L)."""
    prefill: defaultdict[tuple[int, int, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    """By (TP, B, L)."""
    switches: defaultdict[tuple[int, int], list[SwitchReport]] = field(default_factory=lambda: defaultdict(list))
    """By (source, target), in the middle of a batch."""
    group_s: dict[int, float] = field(default_factory=dict)
    """By degree; its groups are made once."""
    capture_s: defaultdict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    """By the degree that was switched to."""
    kv_bytes_per_s: defaultdict[tuple[int, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    """By (source, target)."""
    all_reduces: defaultdict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    """By TP, in bytes a second."""

    @property
    def degrees(self) -> set[int]:
        """Under which anything was measured."""
        return {tp for tp, *_ in self.decode}

    def profile(self, key: ProfileKey, plan: Plan) -> TPProfile:
        """Their medians."""
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
                    seconds=statistics.median(seconds),
                )
                for (tp, replicas, size, length), seconds in sorted(self.decode.items())
            ),
            prefill=tuple(
                PrefillPoint(tp=tp, batch_size=size, length=length, seconds=statistics.median(seconds))
                for (tp, size, length), seconds in sorted(self.prefill.items())
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
        """Groups are made once. Of those that came with the ranks it is taken to have been as long as of the others."""
        longest = max(self.group_s.values(), default=0.0)
        return {degree: longest for degree in plan.degrees if degree > 1} | self.group_s


def profile_tp(config: TPProfileConfig, *, force: bool = False) -> None:
    """Measure, write the profile, in place of what is there with `force`, and print it as tables.

    Raises:
        UserError: the model cannot be split so, the cache has no room for what is to be measured, or the file exists or
            cannot be written.
        EngineError: a rank died, or memory has no room for a switch.
    """
    if config.output is not None:
        check_new_file("output", Path(config.output), force=force)
    prepare_torch(config.device, config.threads)
    model_dir, device = resolve_model(config.model), torch.device(config.device)
    architecture = read_architecture(model_dir)
    key = profile_key(config.engine, architecture, model=model_dir.name, device=device)
    path = default_path(key) if config.output is None else Path(config.output)
    if path.exists() and not force:
        raise UserError(f"{path} exists; measure again with --force, or give another file as output")
    plan = make_plan(config, architecture)
    with closing(Arrangement(_engine(config, plan), architecture, device=device)) as arrangement:
        arrangement.load(stage(checkpoint_weights(architecture, model_dir), arrangement.config), recompute=False)
        profile = measure(Bench(arrangement, architecture, seed=config.seed), plan, key, Console(stderr=True))
    profile.write(path)
    show(profile, Console(highlight=False))
    print(path)


def measure(bench: Bench, plan: Plan, key: ProfileKey, console: Console) -> TPProfile:
    """Measure all rounds, and show on `console` how far it is.

    Raises:
        EngineError: see `profile_tp`.
    """
    figures = Figures()
    with _Steps.shown(plan, console) as done:
        for index in range(plan.rounds):
            done.round = index + 1
            _measure_round(bench, plan, figures, done)
    return figures.profile(key, plan)


def _measure_round(bench: Bench, plan: Plan, figures: Figures, done: "_Steps") -> None:
    for decode, prefill in plan.turns:
        back = bench.tp != plan.degrees[0]
        for tp in reversed(plan.degrees) if back else plan.degrees:
            if tp != bench.tp:
                _switch(bench, tp, figures)
            _measure_points(bench, plan, decode, prefill, figures, done)
    walk = round_trip([bench.tp, *(tp for tp in plan.degrees if tp != bench.tp)])
    bench.hold(*plan.held)
    bench.step()
    for source, target in pairwise(walk):
        report, sent_bytes = _switch(bench, target, figures)
        figures.switches[source, target].append(report)
        figures.kv_bytes_per_s[source, target].append(sent_bytes / report.kv_s)
        # and as in the middle of a batch, little of what moves next is in the processor's caches after these
        first_s, second_s = bench.step(), bench.step()
        figures.capture_s[target].append(max(0.0, first_s - second_s))
        if target > 1:
            figures.all_reduces[target].append(bench.all_reduce_bytes_per_s(plan.decode[-1][0], times=ALL_REDUCES))
        done.count(f"TP {source} to {target}")
    bench.clear()


def _switch(bench: Bench, tp: int, figures: Figures) -> MeasuredSwitch:
    """Change the degree, and take note of groups that were made for it."""
    switch = bench.switch(tp)
    made = switch.report.made_groups
    figures.group_s |= {degree: switch.report.groups_s / len(made) for degree in made}
    return switch


def _measure_points(
    bench: Bench, plan: Plan, decode: Points, prefill: Points, figures: Figures, done: "_Steps"
) -> None:
    """Of the arrangement that there is."""
    tp = bench.tp
    if tp not in figures.degrees:  # the first time
        bench.write_cache(plan.blocks)
        bench.decode_s(max(plan.replicas(tp)), *plan.decode[-1], steps=1)
    for size, length in decode:
        for replicas in plan.replicas(tp):
            seconds = bench.decode_s(replicas, size, length, steps=plan.steps)
            figures.decode[tp, replicas, size, length].append(seconds)
            done.count(f"TP {tp}, decoding {size} × {length}")
    for size, length in prefill:
        figures.prefill[tp, size, length].append(bench.prefill_s(size, length))
        done.count(f"TP {tp}, prefilling {size} × {length}")


def round_trip(degrees: Sequence[int]) -> list[int]:
    """A walk from the first degree back to it on which each follows each other one once."""
    first, *others = degrees
    walk = [first]
    for index, other in enumerate(others):
        walk += [*(round_trip(others) if index == 0 else [other]), first]
    return walk


def _engine(config: TPProfileConfig, plan: Plan) -> NativeEngineConfig:
    """Arranged for the first degree: whose groups are made with the ranks, the fewest of all."""
    adaptive_tp = AdaptiveTPConfig(degrees=plan.degrees)
    first = plan.degrees[0]
    return config.engine.model_copy(update={"dp": plan.ranks // first, "tp": first, "adaptive_tp": adaptive_tp})


class _Steps:
    """Says how far it is: with a bar in a terminal, with a line now and then in a log.

    It draws between two measurements only, which it would disturb.
    """

    def __init__(self, plan: Plan, console: Console, progress: Progress) -> None:
        self.round = 0
        """Of the plan's, from 1."""
        self._plan = plan
        self._console = console
        self._progress = progress
        self._bar = progress.add_task("", total=plan.measurements)
        self._done = 0
        self._began = self._logged = time.perf_counter()

    @classmethod
    @contextmanager
    def shown(cls, plan: Plan, console: Console) -> Iterator["_Steps"]:
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
            yield cls(plan, console, progress)

    def count(self, what: str) -> None:
        """A measurement is done."""
        self._done += 1
        text = f"round {self.round} of {self._plan.rounds} · {what}"
        self._progress.update(self._bar, completed=self._done, description=text, refresh=True)
        now = time.perf_counter()
        if not self._console.is_interactive and now - self._logged >= LOG_PERIOD_S:
            self._logged = now
            part = f"{self._done}/{counted(self._plan.measurements, 'measurement')}"
            line = f"{part} · {duration(now - self._began)} · {text}"
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def show(profile: TPProfile, console: Console) -> None:
    """Print what was measured, for people."""
    console.print(title(profile.key), style="bold", soft_wrap=True, markup=False)
    for shown in (decode_table(profile), prefill_table(profile), switch_table(profile)):
        console.print(shown)
        console.print()
