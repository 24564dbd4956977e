"""`tailrace profile engine`: measures where the time of an engine step goes, by batch size.

Each batch is B random prompts with nothing in common. The engine prefills them, then decodes them in lockstep. The
decode steps that are reported are those in which all B sequences computed one token, and nothing else happened.
"""

import os
import platform
import statistics
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import tailrace
from tailrace.commands.files import check_new_file
from tailrace.config.engine import NativeEngineConfig, SamplingConfig
from tailrace.config.generate import ProfileConfig
from tailrace.config.written import shown
from tailrace.engine.base import EngineStats
from tailrace.engine.checks import check_engine
from tailrace.engine.core import EngineCore
from tailrace.engine.decoder.factory import why_torch
from tailrace.engine.factory import make_backend
from tailrace.engine.profile import PARTS, Profiler, StepProfile
from tailrace.errors import ConfigError
from tailrace.host.compute import prepare_torch
from tailrace.models.architecture import read_architecture
from tailrace.models.info import describe_model
from tailrace.models.resolve import resolve_model
from tailrace.report.run_data import write_file
from tailrace.report.text import number, percent
from tailrace.types import Request, Sample

WARM_UP_TOKENS = 4
"""New tokens of the first batch, which is not reported: it compiles, allocates and captures."""


class ProfiledCore(Protocol):
    """The part of an engine's core that is needed to profile it."""

    profiler: Profiler | None
    """The profiler; steps are profiled while there is one."""

    @property
    def has_work(self) -> bool:
        """Whether a request is unfinished."""

    def add(self, request: Request) -> None:
        """Accept a request."""

    def step(self) -> list[Sample]:
        """Make a step and return the samples that it has finished."""

    def stats(self) -> EngineStats:
        """Return the counts of this moment."""


class BatchProfile(msgspec.Struct, frozen=True, kw_only=True):
    """The measurements of one batch size."""

    batch_size: int
    decode_steps: int
    mean_context: float
    """Mean number of cached tokens of a sequence in those steps."""
    median_step_s: float
    mean_step_s: float
    seconds: dict[str, float]
    """Mean seconds of the parts of those steps; they add up to mean_step_s."""
    tokens_per_s: float
    """Tokens per second at the median step."""
    prefill_tokens: int
    """Tokens computed in steps in which no sequence decoded."""
    prefill_tokens_per_s: float


def profile_engine(config: ProfileConfig, json: Path | None, *, force: bool = False) -> None:
    """Measure every batch size, print a table, and write the figures to `json`; `force` replaces an existing file.

    Raises:
        UserError: the engine is not the native one or cannot hold a batch, or the file cannot be written.
    """
    engine = _check_engine(config)
    _check_prefill(config, engine)
    if json is not None:
        check_new_file("--json", json, force=force)
    prepare_torch(config.device, config.threads)
    model_dir = resolve_model(config.model)
    check_engine(engine, model_dir, device=config.device)
    _check_context(config, make_backend(engine).context_length(model_dir))
    with closing(EngineCore(engine, model_dir, device=torch.device(config.device))) as core:
        _check_cache(config, engine, core.stats().total_blocks)
        profiles = profile_batches(core, config, vocab=describe_model(model_dir).vocab)
    slow = why_torch(engine, read_architecture(model_dir), engine.tp, device=torch.device(config.device))
    console = Console(highlight=False)
    console.print(title(config, slow), style="bold", soft_wrap=True, markup=False)
    console.print(table(profiles))
    if json is not None:
        document = msgspec.json.format(msgspec.json.encode(_document(config, profiles, slow)))
        write_file(json.parent, json.name, document + b"\n")


def _check_engine(config: ProfileConfig) -> NativeEngineConfig:
    if not isinstance(config.engine, NativeEngineConfig):
        raise ConfigError(f"engine.type is {config.engine.type!r}: only steps of the native engine can be profiled")
    if config.engine.dp > 1:
        raise ConfigError(f"engine.dp is {config.engine.dp}: a step belongs to one copy of the model; leave it at 1")
    largest = max(config.batch_sizes)
    if largest > config.engine.max_batch_size:
        raise ConfigError(
            f"batch size {largest} exceeds engine.max_batch_size {config.engine.max_batch_size}; raise it"
        )
    return config.engine


def _check_context(config: ProfileConfig, context: int) -> None:
    needed = config.prompt_tokens + config.new_tokens
    if needed > context:
        raise ConfigError(
            f"prompt_tokens {config.prompt_tokens} and new_tokens {config.new_tokens} exceed the context of {context} "
            f"tokens together; lower one of them"
        )


def _check_prefill(config: ProfileConfig, engine: NativeEngineConfig) -> None:
    """Check that the first sequence still decodes when the last one has been prefilled: it makes a token in every
    step."""
    largest = max(config.batch_sizes)
    steps = -(-largest * config.prompt_tokens // engine.prefill_tokens)
    if steps >= config.new_tokens:
        raise ConfigError(
            f"{largest} prompts of {config.prompt_tokens} tokens are prefilled in {steps} steps, so with new_tokens "
            f"{config.new_tokens} they never decode together; raise new_tokens or engine.prefill_tokens"
        )


def _check_cache(config: ProfileConfig, engine: NativeEngineConfig, total_blocks: int) -> None:
    """Check that a batch fits, since it would measure preemptions otherwise. The scheduler keeps a block free for each
    running sequence."""
    largest = max(config.batch_sizes)
    tokens = config.prompt_tokens + config.new_tokens
    needed = largest * (-(-tokens // engine.block_size) + 1)
    if needed > total_blocks:
        raise ConfigError(
            f"engine.kv_cache_gib {engine.kv_cache_gib} holds {total_blocks} blocks, but {largest} sequences of "
            f"{tokens} tokens take {needed}; raise it, or lower batch_sizes"
        )


def profile_batches(core: ProfiledCore, config: ProfileConfig, *, vocab: int) -> list[BatchProfile]:
    """Measure each of `config.batch_sizes` on an idle core, after a warm-up of the largest."""
    random = np.random.default_rng(config.seed)
    _run(core, _requests(config, max(config.batch_sizes), WARM_UP_TOKENS, random, vocab))
    core.profiler = profiler = Profiler()
    profiles = []
    for batch_size in config.batch_sizes:
        _run(core, _requests(config, batch_size, config.new_tokens, random, vocab))
        profiles.append(summarize(profiler.take(), batch_size))
    core.profiler = None
    return profiles


def _requests(
    config: ProfileConfig, batch_size: int, new_tokens: int, random: np.random.Generator, vocab: int
) -> list[Request]:
    sampling = SamplingConfig(max_new_tokens=new_tokens, ignore_eos=True)
    return [
        Request(
            request_id=k,
            group_id=k,
            prompt_ids=random.integers(0, vocab, config.prompt_tokens),
            sampling=sampling,
            seed=int(random.integers(2**63)),
        )
        for k in range(batch_size)
    ]


def _run(core: ProfiledCore, requests: Sequence[Request]) -> None:
    for request in requests:
        core.add(request)
    while core.has_work:
        core.step()


def summarize(steps: Sequence[StepProfile], batch_size: int) -> BatchProfile:
    """Return the figures of a batch from the profiles of all its steps."""
    decodes = [step for step in steps if step.decodes == batch_size and step.prefill_tokens == 0]
    prefills = [step for step in steps if step.decodes == 0 and step.prefill_tokens > 0]
    assert decodes, f"no step decoded all {batch_size} sequences"
    median_s = statistics.median(step.wall_s for step in decodes)
    prefill_tokens = sum(step.prefill_tokens for step in prefills)
    prefill_s = sum(step.wall_s for step in prefills)
    return BatchProfile(
        batch_size=batch_size,
        decode_steps=len(decodes),
        mean_context=statistics.fmean(step.contexts for step in decodes) / batch_size,
        median_step_s=median_s,
        mean_step_s=statistics.fmean(step.wall_s for step in decodes),
        seconds=_mean_parts(decodes),
        tokens_per_s=batch_size / median_s,
        prefill_tokens=prefill_tokens,
        prefill_tokens_per_s=prefill_tokens / prefill_s if prefill_s else 0.0,
    )


def _mean_parts(steps: Sequence[StepProfile]) -> dict[str, float]:
    """Return the mean seconds of each part that occurred, in the order of a step."""
    seen = {part for step in steps for part in step.seconds}
    ordered = [*(part for part in PARTS if part in seen), *sorted(seen.difference(PARTS))]
    return {part: statistics.fmean(step.seconds.get(part, 0.0) for step in steps) for part in ordered}


def table(profiles: Sequence[BatchProfile]) -> Table:
    """Return a table with a column for each batch size: time and speed of a decode step, and the share of each part."""
    shown = Table(box=None, padding=(0, 2, 0, 0))
    shown.add_column("batch size", style="dim")
    for profile in profiles:
        shown.add_column(str(profile.batch_size), justify="right")
    shown.add_row("ms a decode step", *(f"{1000 * profile.median_step_s:.2f}" for profile in profiles))
    shown.add_row("tokens/s", *(number(profile.tokens_per_s) for profile in profiles), end_section=True)
    for part in dict.fromkeys(part for profile in profiles for part in profile.seconds):
        shares = [profile.seconds.get(part, 0.0) / profile.mean_step_s for profile in profiles]
        shown.add_row(f"  {part.replace('_', '-')}", *map(percent, shares))
    shown.add_row("prefill tokens/s", *(number(profile.prefill_tokens_per_s) for profile in profiles))
    return shown


def title(config: ProfileConfig, slow: str | None) -> str:
    """Describe the measurement in a line. `slow`: why the C++ decoder was not used, or None if it was."""
    assert isinstance(config.engine, NativeEngineConfig)
    link = " · emulated link" if config.engine.link else ""
    decoder = "C++ decoder" if slow is None else f"PyTorch decoder ({slow})"
    return (
        f"{config.model.path} · {config.engine.dtype} · TP {config.engine.tp}{link} · {config.device} · "
        f"{config.prompt_tokens} prompt tokens, {config.new_tokens} new · {decoder}"
    )


def _document(config: ProfileConfig, profiles: Sequence[BatchProfile], slow: str | None) -> dict[str, Any]:
    return {
        "profile": "engine",
        "tailrace": tailrace.__version__,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}",
        "config": shown(config),
        "kernels": "cpu" if slow is None else "torch",
        "why_torch": slow,
        "batches": profiles,
    }
