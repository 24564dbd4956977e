"""`tailrace profile machine`: measures an engine and a trainer of a recipe, by themselves and beside each other.

    all cores      engine, then trainer: what a colocated run has
    half of them   engine, then trainer, while the others are idle; then both at the same time, on a half each

Each measurement is a process of its own, bound to its cores, since a process cannot change its threads for good.
"""

import asyncio
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from itertools import count, cycle
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from tailrace.commands.files import check_new_file
from tailrace.commands.profile_trainer import measure_trainer
from tailrace.commands.waiting import Tell, waiting
from tailrace.config.engine import NativeEngineConfig, SamplingConfig
from tailrace.config.run import RunConfig
from tailrace.engine.base import Engine
from tailrace.engine.model.weights import checkpoint_weights
from tailrace.engine.opening import open_engine
from tailrace.errors import PlanError
from tailrace.host.compute import prepare_torch
from tailrace.host.cpu import cpu_name, usable_cores
from tailrace.host.descendants import end_with_parent
from tailrace.models.architecture import read_architecture
from tailrace.models.info import describe_model
from tailrace.models.resolve import resolve_model
from tailrace.planner.local import arrangement_choices, slots_choices
from tailrace.planner.processes import answered
from tailrace.planning.dispatch.costs import StepCosts
from tailrace.planning.packing import GroupPart
from tailrace.planning.step_times.machine import EngineProfile, MachineProfile
from tailrace.planning.step_times.trainer_profile import ProfiledTrainer, TrainerProfile
from tailrace.report.run_data import write_file
from tailrace.report.text import number
from tailrace.types import Request

A = TypeVar("A")
T = TypeVar("T")

_NEW_TOKENS = 20
"""Tokens of each response; a batch of each size makes so many steps."""
_PROMPT_TOKENS = 64
_GROUP = 8
"""Responses to each prompt, which is computed once for them, as in a run."""
_INSTALLS = 3
_LEAST_BEND = 0.1
"""A step takes such a part of the line's seconds at least; less is an error of its prompts' seconds."""
_LIMIT_S = 1800.0
"""Seconds in which a measurement has ended."""
_MOST_TOKENS = 1024
"""Of a micro-batch that is measured for a plan; what larger ones take follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    """A measurement, as it goes to its process."""

    config: str
    """The recipe as JSON."""
    model_dir: str
    cores: tuple[int, ...]


def profile_machine(config: RunConfig, json: Path | None, *, force: bool = False) -> None:
    """Measure, print a table, and write the profile to `json`; `force` replaces an existing file.

    Raises:
        UserError: the engine is not the native one, the machine has one core, or the file cannot be written.
    """
    if json is not None:
        check_new_file("--json", json, force=force)
    with waiting() as tell:
        profile = measure_choices(config, tell)
    console = Console(highlight=False)
    console.print(_table(profile))
    if json is not None:
        document = msgspec.json.format(msgspec.json.encode(profile))
        write_file(json.parent, json.name, document + b"\n")


def measure_choices(config: RunConfig, tell: Tell) -> MachineProfile:
    """Measure what a plan for this machine chooses from, with batches of every size. `tell` takes what is done now.

    Raises:
        PlanError: see `measure_machine`.
    """
    tokens = min(_MOST_TOKENS, config.trainer.micro_batch_tokens)
    changes: dict[str, Any] = {"trainer": config.trainer.model_copy(update={"micro_batch_tokens": tokens})}
    if isinstance(config.engine, NativeEngineConfig):
        changes["engine"] = config.engine.model_copy(update={"max_batch_size": slots_choices(config)[-1]})
    return measure_machine(
        config.model_copy(update=changes), arrangements=arrangement_choices(len(usable_cores())), tell=tell
    )


def measure_machine(
    config: RunConfig,
    cores: Sequence[int] | None = None,
    *,
    arrangements: Sequence[tuple[int, int]] = (),
    tell: Tell = lambda text: None,
) -> MachineProfile:
    """Measure the engine and the trainer of a recipe on this machine, or on these cores of it.

    Args:
        arrangements: TP and DP of further engines; each is measured where there is a core for each of its ranks.
        tell: takes what is done now.

    Raises:
        PlanError: the engine is not the native one, or there are fewer than two cores.
    """
    usable = tuple(cores or usable_cores())
    engine = config.engine
    if not isinstance(engine, NativeEngineConfig):
        raise PlanError(f"engine.type is {engine.type!r}; only the native engine can be measured")
    if len(usable) < 2:
        raise PlanError(f"this process may use the cores {list(usable)}; an engine beside a trainer takes two")
    half = len(usable) // 2
    first, second = usable[:half], usable[half : 2 * half]
    model_dir = str(resolve_model(config.model).resolve())
    own = engine.tp, engine.dp

    def task(cores: tuple[int, ...], arrangement: tuple[int, int] = own) -> _Task:
        changed = config.model_copy(update={"engine": _arranged(engine, *arrangement)})
        return _Task(config=changed.model_dump_json(), model_dir=model_dir, cores=cores)

    each = dict.fromkeys([own, (1, 1), *arrangements])
    tell("measuring engines, by themselves")
    engines = [
        in_process(_engine, task(cores, (tp, dp)))
        for cores in dict.fromkeys([usable, first])
        for tp, dp in each
        if tp * dp <= len(cores)
    ]
    tell("measuring the trainer, by itself")
    trainer = in_process(partial(_trainer, rounds=2), task(usable))
    began = time.monotonic()
    trainer_apart = in_process(_trainer, task(second))
    trained_s = time.monotonic() - began
    alone = next(one for one in engines if one.cores == half)
    tell("measuring an engine beside a trainer")
    beside, trainer_beside = _beside(task(first, alone.arrangement), task(second), trained_s)
    return MachineProfile(
        model=config.model.path,
        hardware=cpu_name(),
        cores=len(usable),
        engines=engines,
        trainers=[trainer, trainer_apart],
        engine_beside=_full_step_s(beside, engine.max_batch_size) / _full_step_s(alone, engine.max_batch_size),
        trainer_beside=statistics.median(
            slow.seconds / quick.seconds
            for slow, quick in zip(trainer_beside.update, trainer_apart.update, strict=True)
        ),
    )


def _arranged(engine: NativeEngineConfig, tp: int, dp: int) -> NativeEngineConfig:
    """An engine in another arrangement, whose replicas share the sequences of the recipe's."""
    slots = -(-engine.max_batch_size * engine.dp // dp)
    keys = {"tp": tp, "dp": dp, "max_batch_size": slots, "threads_per_rank": None, "adaptive_tp": None}
    return engine.model_copy(update=keys)


def _full_step_s(engine: EngineProfile, slots: int) -> float:
    """Seconds of a decode step of a replica with the largest batch."""
    return engine.times.step_s(1, slots, slots * (_PROMPT_TOKENS + _NEW_TOKENS / 2), 1)


def in_process(work: Callable[[A], T], argument: A) -> T:
    """Return `work(argument)`, done in a process of its own."""
    with _process() as process:
        return _waited(process.submit(work, argument))


def _beside(engine: _Task, trainer: _Task, trained_s: float) -> tuple[EngineProfile, TrainerProfile]:
    """Measure both at the same time. The engine goes on for the seconds that the trainer should take."""
    with _process() as one, _process() as other:
        measuring = one.submit(_engine, engine, trained_s), other.submit(_trainer, trainer)
        return _waited(measuring[0]), _waited(measuring[1])


def _waited(measuring: Future[T]) -> T:
    """Return what a process has measured."""
    died = (
        "a process that measured has died: this machine may have too little memory; take a smaller model, or smaller "
        "engine.kv_cache_gib, engine.max_batch_size and trainer.micro_batch_tokens"
    )
    late = (
        f"a measurement on this machine has not ended after {_LIMIT_S / 60:.0f} minutes; take a smaller model, or "
        "smaller engine.max_batch_size and trainer.micro_batch_tokens"
    )
    with answered(died=died, late=late):
        return measuring.result(_LIMIT_S)


def _process() -> ProcessPoolExecutor:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])  # PyTorch is imported once for all of them
    return ProcessPoolExecutor(max_workers=1, mp_context=context, initializer=end_with_parent)


def _opened(task: _Task) -> RunConfig:
    """Bind this process to its cores, and read the recipe."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, task.cores)
    config = RunConfig.model_validate_json(task.config)
    prepare_torch(config.device, len(task.cores))
    return config


def _engine(task: _Task, least_s: float = 0.0) -> EngineProfile:
    """Measure an engine. `least_s`: for so many seconds at least."""
    config = _opened(task)
    with ThreadPoolExecutor(max_workers=1) as executor:
        return asyncio.run(_measured_engine(config, executor, task, least_s))


async def _measured_engine(config: RunConfig, executor: Executor, task: _Task, least_s: float) -> EngineProfile:
    engine_config, model_dir = config.engine, Path(task.model_dir)
    assert isinstance(engine_config, NativeEngineConfig)
    sizes, dp = _sizes(engine_config.max_batch_size), engine_config.dp
    engine = await open_engine(engine_config, model_dir, device=config.device, executor=executor)
    try:
        batches = _Batches(engine, describe_model(model_dir).vocab)
        costs, by_size = await _step_costs(engine, batches, sizes, dp, least_s)
        weights = checkpoint_weights(read_architecture(model_dir), model_dir)
        installs = []
        for version in range(1, _INSTALLS + 1):
            start = time.perf_counter()
            await engine.update_weights(version, weights.items())
            installs.append(time.perf_counter() - start)
    finally:
        await engine.close()
    return EngineProfile(
        cores=len(task.cores),
        tp=engine_config.tp,
        dp=dp,
        costs=costs,
        by_size=by_size,
        install_s=statistics.median(installs),
    )


async def _step_costs(
    engine: Engine, batches: "_Batches", sizes: Sequence[int], dp: int, least_s: float
) -> tuple[StepCosts, dict[int, float]]:
    """Generate batches of all sizes in each of the replicas. Return what steps cost, and `EngineProfile.by_size`.

    With `least_s` it goes on for so long beside a trainer. Only the largest count then, and they come first: the
    trainer may have ended before the smallest.
    """
    began = time.monotonic()
    seconds: dict[int, float] = {}
    order = cycle(reversed(sizes))
    while True:
        size = next(order)
        seconds[size] = await batches.generate(size, dp)
        load = engine.load()
        is_enough = time.monotonic() - began >= least_s if least_s else len(seconds) == len(sizes)
        if is_enough and load is not None and isinstance(load.costs, StepCosts):
            return load.costs, {size: _bend(load.costs, size, took) for size, took in seconds.items()}


class _Batches:
    """Batches of responses to groups of prompts; all have the same length."""

    def __init__(self, engine: Engine, vocab: int) -> None:
        self._engine = engine
        self._vocab = vocab
        self._random = np.random.default_rng(0)
        self._groups, self._ids = count(), count()

    async def generate(self, size: int, replicas: int) -> float:
        """Generate so many in each of the replicas, and return the seconds."""
        requests = [request for _ in range(replicas) for group in _groups(size) for request in self._requests(group)]
        start = time.perf_counter()
        async with aclosing(self._engine.submit(requests)) as samples:
            async for _ in samples:
                pass
        return time.perf_counter() - start

    def _requests(self, size: int) -> list[Request]:
        """A group of requests."""
        group, prompt = next(self._groups), self._random.integers(0, self._vocab, _PROMPT_TOKENS)
        sampling = SamplingConfig(max_new_tokens=_NEW_TOKENS, ignore_eos=True)
        numbers = [next(self._ids) for _ in range(size)]
        return [
            Request(request_id=number, group_id=group, prompt_ids=prompt, sampling=sampling, seed=number)
            for number in numbers
        ]


def _groups(size: int) -> list[int]:
    """The sizes of the groups of a batch."""
    return [min(_GROUP, size - begin) for begin in range(0, size, _GROUP)]


def _bend(costs: StepCosts, size: int, seconds: float) -> float:
    """By how many times a step takes longer than by `costs`, with what goes by between two steps: a batch of such a
    size, of a replica, took so many seconds."""
    prompts = len(_groups(size))
    # the first response of a group gets its first token with the prompt, so it has none to make in the last step
    together = [size] * (_NEW_TOKENS - 1) + [size - prompts] * (size > prompts)
    steps = enumerate(together, start=1)
    line_s = sum(costs.step_s(1, batch, batch * (_PROMPT_TOKENS + step), 1) for step, batch in steps)
    return max(_LEAST_BEND, (seconds - costs.prefill * prompts * _PROMPT_TOKENS) / line_s)


def _sizes(slots: int) -> list[int]:
    """Batches that are measured: powers of two, and the largest."""
    return sorted({slots, *(2**power for power in range(slots.bit_length()))})


def _trainer(task: _Task, rounds: int = 1) -> TrainerProfile:
    """Measure a trainer so many times."""
    return measure_trainer(_opened(task), rounds=rounds)


def _table(profile: MachineProfile) -> Table:
    shown = Table(box=None, padding=(0, 2, 0, 0))
    shown.add_column(profile.hardware, style="dim")
    for name in ("all cores", "half of them", "beside the other"):
        shown.add_column(name, justify="right")
    engines = [next(one for one in profile.engines if one.cores == cores) for cores in (profile.cores, profile.half)]
    for size in (1, 8, 64):
        each = [1000 * engine.times.step_s(1, size, size * _PROMPT_TOKENS, 1) for engine in engines]
        beside = number(each[1] * profile.engine_beside)
        shown.add_row(f"ms a decode step of {size}", *map(number, each), beside)
    trainers = [ProfiledTrainer(one) for one in profile.trainers]
    seconds = [trainer.update_s([GroupPart((0,), 64, (448,))]) for trainer in trainers]
    row = (*map(number, seconds), number(seconds[1] * profile.trainer_beside))
    shown.add_row("s an update of 512 tokens", *row)
    optimizer: list[Any] = [trainer.optimizer_s() for trainer in trainers]
    shown.add_row("s an optimizer step", *map(number, optimizer), "")
    shown.add_row("s to install weights", *(number(engine.install_s) for engine in engines), "")
    return shown
