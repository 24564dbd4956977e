"""`tailrace profile tp`: what decode steps, prefills and switches take under each TP degree, for engines with
`adaptive_tp`.

One engine, whose ranks go from degree to degree, measures everything in each of several rounds, and one batch size
under all degrees before the next. So a machine that slows down for a while does so to all of them:

    each batch size ──each degree──▶ decode steps ────────────────────────┐
    prefills        ──each degree──▶ seconds ─────────────────────────────┼──medians over rounds──▶ TPProfile
    round trip      ──each pair of degrees──▶ weights, rest, groups ──────┤
    round trip with sequences ──each pair──▶ rate of keys and values ─────┘

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
from rich.table import Table

import tailrace
from tailrace.config.engine import AdaptiveTPConfig, NativeEngineConfig
from tailrace.config.generate import TPProfileConfig
from tailrace.engine.adaptive_tp.measure import Bench, SwitchSeconds, shortest_length, tokens_reached
from tailrace.engine.adaptive_tp.profile_key import default_path, profile_key
from tailrace.engine.architecture import Architecture, read_architecture
from tailrace.engine.arrangement import Arrangement
from tailrace.engine.decoder.factory import local_sizes, longest_sequence
from tailrace.engine.ranks.factory import stage
from tailrace.engine.weights import check_weights, read_weights
from tailrace.errors import ConfigError, EngineError, ModelError, UserError
from tailrace.models.resolve import resolve_model
from tailrace.planning.tp_profile import SHORTEST, DecodePoint, PrefillPoint, ProfileKey, SwitchCost, TPProfile, grid
from tailrace.preparation import check_new_file, prepare_torch
from tailrace.report.text import counted, duration, number

TOKEN_BUDGET = 16384
MAX_LENGTH = 2048
"""These two where nobody chooses; see `TPProfileConfig`."""
PREFILL_TOKENS = 1024
"""Of a prefill that is measured, at the most: what is longer takes in proportion."""
PREFILL_POINTS = 6
HELD_TOKENS = 2048
"""Of each rank, in the cache while switches are measured, in sequences of `HELD_LENGTH`."""
HELD_LENGTH = 512
LOG_PERIOD_S = 10.0


Points = tuple[tuple[int, int], ...]
"""(B, L)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured."""

    degrees: tuple[int, ...]
    ranks: int
    decode: Points
    """(B, L): sequences of a replica, and cached tokens of each."""
    prefill: Points
    """(B, L): prompts, and tokens of each."""
    token_budget: int
    blocks: int
    """That any of it takes of a replica's cache."""
    held: tuple[int, int]
    """Sequences of each rank, and cached tokens of each, that move with a switch."""
    steps: int
    rounds: int

    @property
    def turns(self) -> list[tuple[Points, Points]]:
        """What is decoded and prefilled before the degree changes: one batch size, or all that is prefilled."""
        sizes = sorted({size for size, _ in self.decode})
        return [*((tuple(p for p in self.decode if p[0] == size), ()) for size in sizes), ((), self.prefill)]

    def replicas(self, tp: int) -> list[int]:
        """How many are measured beside each other: one, and all of them."""
        return sorted({1, self.ranks // tp})

    @property
    def measurements(self) -> int:
        """Of all rounds."""
        windows = sum(len(self.replicas(tp)) for tp in self.degrees) * len(self.decode)
        switches = 2 * len(self.degrees) * (len(self.degrees) - 1)
        return self.rounds * (windows + len(self.degrees) * len(self.prefill) + switches)


@dataclass(slots=True)
class Figures:
    """Seconds of each measurement, of all rounds so far."""

    decode: defaultdict[tuple[int, int, int, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    """By (TP, replicas, B, L)."""
    prefill: defaultdict[tuple[int, int, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    """By (TP, B, L)."""
    switches: defaultdict[tuple[int, int], list[SwitchSeconds]] = field(default_factory=lambda: defaultdict(list))
    """By (source, target), without sequences."""
    migrations: defaultdict[tuple[int, int], list[SwitchSeconds]] = field(default_factory=lambda: defaultdict(list))
    """The same with sequences."""

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
                    kv_bytes_per_s=statistics.median(
                        migration.sent_bytes / migration.kv_s for migration in self.migrations[source, target]
                    ),
                )
                for (source, target), switches in sorted(self.switches.items())
            ),
            group_s=self._group_s(plan),
        )

    def _group_s(self, plan: Plan) -> dict[int, float]:
        """Groups are made once. Of those that came with the ranks it is taken to have been as long as of the others."""
        made = {
            degree: switch.groups_s / len(switch.made_groups)
            for switches in self.switches.values()
            for switch in switches
            for degree in switch.made_groups
        }
        longest = max(made.values(), default=0.0)
        return made | {degree: longest for degree in plan.degrees if degree > 1 and degree not in made}


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
        _load(arrangement, architecture, model_dir)
        profile = measure(Bench(arrangement, architecture, seed=config.seed), plan, key, Console(stderr=True))
    profile.write(path)
    show(profile, Console(highlight=False))
    print(path)


def make_plan(config: TPProfileConfig, architecture: Architecture) -> Plan:
    """What to measure of a model.

    Raises:
        ModelError: it cannot be split so.
        ConfigError: the cache or the context has no room for what was asked for.
    """
    engine, steps = config.engine, config.steps
    blocks = {tp: _blocks(engine, architecture, tp) for tp in _degrees(config, architecture)}
    fewest, shortest = min(blocks.values()), shortest_length(steps)
    room = longest_sequence(engine, architecture) - tokens_reached(0, steps)
    if room < shortest:
        raise ConfigError(f"steps is {steps}, and the context has no room for so many; lower it")
    if fewest < _blocks_for(max(SHORTEST, shortest), steps, engine):
        raise ConfigError(f"{_cache(engine, fewest)}, which is less than anything to be measured takes; raise it")
    cached, batch = fewest * engine.block_size, engine.max_batch_size
    token_budget = _chosen("token_budget", config.token_budget, TOKEN_BUDGET, cached, "engine.kv_cache_gib")
    max_batch_size = _chosen("max_batch_size", config.max_batch_size, batch, batch, "engine.max_batch_size")
    max_length = _chosen(
        "max_length", config.max_length, MAX_LENGTH, room, "engine.max_model_len where the model allows"
    )
    wanted = grid(token_budget, max_batch_size, max_length, points=config.points)
    takes = {
        (size, length): size * _blocks_for(length, steps, engine)
        for size, length in sorted({(size, max(length, shortest)) for size, length in wanted})
    }
    decode = tuple(p for p, taken in takes.items() if taken <= fewest and p[0] * p[1] <= token_budget)
    if not decode:
        raise ConfigError(
            f"token_budget {token_budget} leaves nothing to measure in {steps} steps; raise it or lower steps"
        )
    return Plan(
        degrees=tuple(blocks),
        ranks=engine.ranks,
        decode=decode,
        prefill=tuple(grid(min(token_budget, PREFILL_TOKENS), max_batch_size, max_length, points=PREFILL_POINTS)),
        token_budget=token_budget,
        blocks=max(takes[point] for point in decode),
        held=_held(engine, blocks, max_length),
        steps=steps,
        rounds=config.rounds,
    )


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
                figures.switches[bench.tp, tp].append(bench.switch(tp))
            _measure_points(bench, plan, decode, prefill, figures, done)
    walk = round_trip([bench.tp, *(tp for tp in plan.degrees if tp != bench.tp)])
    for source, target in pairwise(walk):
        figures.switches[source, target].append(bench.switch(target))
        done.count(f"TP {source} to {target}")
    bench.hold(*plan.held)
    for source, target in pairwise(walk):
        figures.migrations[source, target].append(bench.switch(target))
        done.count(f"TP {source} to {target} with sequences")
    bench.clear()


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


def _load(arrangement: Arrangement, architecture: Architecture, model_dir: Path) -> None:
    try:
        named = check_weights(architecture, read_weights(model_dir))
    except EngineError as error:
        raise ModelError(f"{model_dir}: the weights do not fit config.json: {error}") from error
    arrangement.load(stage(named, arrangement.config), recompute=False)


def _degrees(config: TPProfileConfig, architecture: Architecture) -> list[int]:
    """That are asked for, or all that the model can be split in."""
    most = architecture.query_heads
    degrees = [tp for tp in config.all_degrees if config.degrees is not None or tp <= most]
    if len(degrees) < 2:
        raise ConfigError(
            f"the model has {most} query heads, so {config.engine.ranks} ranks cannot be arranged in several ways; "
            "choose another engine.dp"
        )
    return degrees


def _blocks(engine: NativeEngineConfig, architecture: Architecture, tp: int) -> int:
    """Of a replica's cache."""
    try:
        return local_sizes(engine, architecture, tp)[1]
    except ModelError:
        heads = architecture.query_heads
        raise ModelError(
            f"degrees has {tp}, which leaves ranks without a query head, the model has {heads}; remove it"
        ) from None
    except EngineError as error:
        raise ConfigError(f"engine.{error}") from None


def _blocks_for(length: int, steps: int, engine: NativeEngineConfig) -> int:
    """That a sequence takes in a window around `length`."""
    return -(-tokens_reached(length, steps) // engine.block_size)


def _cache(engine: NativeEngineConfig, blocks: int) -> str:
    """How an error begins."""
    return f"engine.kv_cache_gib {engine.kv_cache_gib} holds {blocks} blocks of {engine.block_size} tokens"


def _chosen(name: str, given: int | None, default: int, most: int, limit: str) -> int:
    if given is None:
        return min(default, most)
    if given > most:
        raise ConfigError(f"{name} is {given}, and the engine has room for {most}; lower it, or raise {limit}")
    return given


def _held(engine: NativeEngineConfig, blocks: dict[int, int], max_length: int) -> tuple[int, int]:
    """What is moved: as many tokens of each rank, so that they fit under every degree, with a block more for each."""
    room = min(count // tp for tp, count in blocks.items())
    length = min(HELD_LENGTH, max_length, (room - 1) * engine.block_size - 1)
    if length < 1:
        raise ConfigError(f"{_cache(engine, room)} for each rank, which leaves none that could be moved; raise it")
    fitting = min(room // (length // engine.block_size + 2), engine.max_batch_size // max(blocks))
    return max(1, min(HELD_TOKENS // length, fitting)), length


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


def title(key: ProfileKey) -> str:
    """What was measured."""
    link = f" · link of {key.link}" if key.link else ""
    threads = f"{counted(key.ranks, 'rank')} with {counted(key.threads_per_rank, 'thread')} each"
    return f"{key.model} · {key.dtype} · {threads}{link} · {key.hardware} · {key.backend} · {key.collectives}"


def decode_table(profile: TPProfile) -> Table:
    """A row for each batch and length, a column for each degree and number of replicas beside each other."""
    columns = sorted({(point.tp, point.replicas) for point in profile.decode})
    seconds = {(p.tp, p.replicas, p.batch_size, p.context_tokens): p.seconds for p in profile.decode}
    shown = _table("ms a decode step", "sequences", "tokens of each")
    for tp, replicas in columns:
        shown.add_column(f"TP {tp}" + (f" × {replicas}" if replicas > 1 else ""), justify="right")
    for size, tokens in sorted({(point.batch_size, point.context_tokens) for point in profile.decode}):
        times = (_ms(seconds.get((*column, size, tokens))) for column in columns)
        shown.add_row(f"{size:,}", f"{tokens // size:,}", *times)
    return shown


def prefill_table(profile: TPProfile) -> Table:
    """A row for each batch and length, a column for each degree."""
    seconds = {(p.tp, p.batch_size, p.length): p.seconds for p in profile.prefill}
    shown = _table("ms to prefill", "prompts", "tokens of each")
    for tp in profile.degrees:
        shown.add_column(f"TP {tp}", justify="right")
    for size, length in sorted({(point.batch_size, point.length) for point in profile.prefill}):
        shown.add_row(f"{size:,}", f"{length:,}", *(_ms(seconds.get((tp, size, length))) for tp in profile.degrees))
    return shown


def switch_table(profile: TPProfile) -> Table:
    """A row for each pair of degrees."""
    shown = _table("ms to switch", "from", "to")
    for name in ("weights", "rest", "groups, once", "cache, MiB/s of a rank"):
        shown.add_column(name, justify="right")
    for cost in profile.switches:
        shown.add_row(
            f"TP {cost.source_tp}",
            f"TP {cost.target_tp}",
            _ms(cost.reshard_s),
            _ms(cost.rest_s),
            _ms(profile.group_s.get(cost.target_tp)),
            number(cost.kv_bytes_per_s / 2**20),
        )
    return shown


def _table(title: str, *keys: str) -> Table:
    shown = Table(title=title, title_justify="left", title_style="", box=None, padding=(0, 2, 0, 0))
    for key in keys:
        shown.add_column(key, style="dim", justify="right")
    return shown


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1000 * seconds:.2f}"
