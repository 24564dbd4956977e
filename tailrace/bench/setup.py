"""The set-up of a benchmark: which lengths are played, and the configuration of the run that plays them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from tailrace.config.algorithm import DapoConfig
from tailrace.config.engine import EngineConfig
from tailrace.config.load import load_config
from tailrace.config.model import ModelConfig
from tailrace.config.prompts import TraceSource
from tailrace.config.run import RunConfig
from tailrace.engine.factory import make_backend
from tailrace.errors import ConfigError, TraceError
from tailrace.models.resolve import resolve_model
from tailrace.registers import run_files
from tailrace.run.workers.pools import device_workers
from tailrace.workloads.files import read_trace
from tailrace.workloads.replay import Replay
from tailrace.workloads.trace import Provenance, Trace

TRACES = (".parquet", ".jsonl")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A benchmark before it begins."""

    workload: str
    """The name of the workload, or the file of its trace."""
    trace: Trace
    """What is played."""
    played: Replay
    """The same, group by group."""
    config: RunConfig
    """The run that plays it. `trace` is to be at its `pipeline.replay` then."""
    limit: int
    """`sampling.max_new_tokens` of the recipe."""
    cut: int
    """Responses that were cut off at it."""

    @property
    def devices(self) -> int:
        """The devices of the run: one for each rank of its engines and, with separate workers, for each other model."""
        ranks = {pool: int(getattr(engine, "ranks", 1)) for pool, engine in self.config.engines.items()}
        if self.config.pipeline.placement == "colocated":
            return sum(ranks.values())
        return sum(count * ranks.get(pool, 1) for pool, count in device_workers(self.config).items())

    def reading(self, path: Path) -> RunConfig:
        """The run with its trace in another file, at `path`."""
        source = TraceSource(path=str(path))
        changes = {
            "prompts": self.config.prompts.model_copy(update={"source": source}),
            "pipeline": self.config.pipeline.model_copy(update={"replay": source.path}),
        }
        return self.config.model_copy(update=changes)


def load_sized(
    workload: str, recipe: Path, overrides: Sequence[str], *, resample: bool
) -> tuple[RunConfig, Trace | None]:
    """Return the recipe with the sizes of a recorded trace, and the trace; see `make_setup`.

    Raises:
        UserError: the recipe is wrong, or the trace.
    """
    is_recorded = Path(workload).suffix in TRACES and not resample
    recorded = read_trace(Path(workload)) if is_recorded else None
    sizes = [] if recorded is None else _sizes(recorded, workload)
    return load_config(recipe, [*sizes, *overrides]), recorded


def make_setup(
    workload: str,
    recipe: Path,
    overrides: Sequence[str],
    *,
    seed: int = 0,
    scale: float = 1.0,
    resample: bool = False,
    weights: Callable[[Path], Path] | None = None,
) -> Setup:
    """Make the set-up of a benchmark. Nothing is written, unless by `weights`.

    Args:
        workload: see `open_workload`. A file of a trace is played as it was recorded: its steps and groups take the
            place of the recipe's `trainer.steps`, `trainer.train_batch_size` and `algorithm.group_size`.
        recipe: see `load_config`. Its prompts and evaluations have no effect, and of its rewards
            only the number of gradings at a time.
        overrides: changes to the recipe. They may also shorten a recorded trace.
        seed: of the sampling.
        scale: all lengths are multiplied by it.
        resample: draw whole groups of a trace with replacement, in steps of the recipe's size.
        weights: makes a model of the architecture at `model.path`, such as `random_model`; by default a model is there.

    Raises:
        UserError: there is no such workload, the recipe is wrong, a recorded trace is too small for it, or the
            longest prompt and the longest response together exceed the context, also where they are of two samples.
    """
    config, recorded = load_sized(workload, recipe, overrides, resample=resample)
    if weights is not None:
        model = ModelConfig(path=str(weights(Path(config.model.path))))
        config = config.model_copy(update={"model": model})
    recorded = recorded or _drawn(workload, config, seed)
    taken = _taken(recorded, config, workload)
    whole = taken.map(lambda script: script.scaled(scale) if scale != 1 else script)
    limit = config.sampling.max_new_tokens
    played = whole.map(lambda script: script.cut(limit))
    _check_context(workload, played, config, scale)
    provenance = Provenance(source=recorded.provenance.source, model=recorded.provenance.model)
    return Setup(
        workload=workload,
        played=played,
        trace=played.trace(provenance, groups_per_step=config.groups_per_step),
        config=_playing(config, played),
        limit=limit,
        cut=sum(script.tokens > limit for group in whole.groups for script in group),
    )


def _drawn(workload: str, config: RunConfig, seed: int) -> Trace:
    """A trace of the steps of `config`."""
    from tailrace.workloads.samplers.factory import open_workload  # scipy takes a second

    return open_workload(workload).sample(
        steps=config.trainer.steps,
        groups=config.groups_per_step,
        group_size=config.algorithm.group_size,
        seed=seed,
    )


def _taken(trace: Trace, config: RunConfig, workload: str) -> Replay:
    """What the run plays of a trace.

    Raises:
        TraceError: the trace is too small, or the tokens of a turn are unknown.
    """
    replay, groups = Replay.of(trace), config.trainer.steps * config.groups_per_step
    try:
        return replay.first(groups=groups, group_size=config.algorithm.group_size, name=workload)
    except TraceError as error:
        raise TraceError(f"{error}, or draw from it with --resample") from None


def _sizes(trace: Trace, name: str) -> list[str]:
    """The size of a run that plays a trace as it was recorded, as overrides.

    Raises:
        TraceError: its steps have different numbers of groups, or its groups of samples; or a group has one sample.
    """
    groups = trace.samples.group_by("step", "group").len()["len"].unique().to_list()
    steps = trace.samples.group_by("step").agg(pl.col("group").n_unique())["group"].unique().to_list()
    if len(groups) > 1 or len(steps) > 1:
        what = f"groups of {_range(groups)} samples" if len(groups) > 1 else f"steps of {_range(steps)} groups"
        raise TraceError(f"{name} has {what}, and a run has them all of one size; draw from it with --resample")
    if groups == [1]:
        raise TraceError(
            f"{name} has groups of one sample, and a run compares the samples of a group; draw larger groups from a "
            "file of `tailrace trace fit`"
        )
    return [
        f"trainer.steps={len(trace.steps)}",
        f"trainer.train_batch_size={groups[0] * steps[0]}",
        f"algorithm.group_size={groups[0]}",
    ]


def _range(numbers: Sequence[int]) -> str:
    return f"{min(numbers)} to {max(numbers)}"


def _check_context(workload: str, played: Replay, config: RunConfig, scale: float) -> None:
    model = resolve_model(config.model)
    context = min(make_backend(engine).context_length(model) for engine in config.engines.values())
    prompt, response = played.longest_prompt, played.longest_response
    if prompt + response > context:
        raise ConfigError(
            f"{workload} has prompts of up to {prompt} and responses of up to {response} tokens, and the context of "
            f"the engine is {context}; shorten it with --scale {_shorter(scale * context / (prompt + response))}"
            + (f" or sampling.max_new_tokens={context - prompt}" if prompt < context else "")
        )


def _shorter(factor: float) -> str:
    """A factor with two digits and a little lower: each length is rounded by itself."""
    return f"{max(0.001, float(f'{0.94 * factor:.1e}')):g}"


def _playing(config: RunConfig, played: Replay) -> RunConfig:
    """The configuration of a run that does nothing but play the trace in its directory."""
    path = str(Path(config.output_dir) / run_files.PLAYED_TRACE)
    changes: dict[str, dict[str, Any]] = {
        "prompts": {"source": {"type": "trace", "path": path}, "held_out": 0, "shuffle": False},
        "pipeline": {**config.pipeline.model_dump(), "replay": path},
        # special tokens in the text, which nobody reads: otherwise a warning would say that graders do not see them
        "sampling": {
            **config.sampling.model_dump(),
            "max_new_tokens": played.longest_response,
            "keep_special_tokens": True,
        },
        "evaluation": {},
        "checkpoint": config.checkpoint.model_copy(update={"keep_best": None}).model_dump(),
        "observe": {**config.observe.model_dump(), "tensorboard": False, "sample_groups": 0},
        "engine": _engine(config.engine, config),
        "cluster": config.cluster.model_dump(),
    }
    if isinstance(algorithm := config.resolved_algorithm, DapoConfig):  # its limit is not that of what is played
        changes["algorithm"] = algorithm.model_copy(update={"dynamic_sampling": None}).model_dump()
    for name, pool in config.cluster.rollout.pools.items():
        if pool.engine is not None:
            changes["cluster"]["rollout"]["pools"][name]["engine"] = _engine(pool.engine, config)
    return RunConfig.model_validate(config.model_dump() | changes)


def _engine(of_recipe: EngineConfig, config: RunConfig) -> dict[str, Any]:
    """An engine of the recipe. Its adaptive TP does not learn the exact lengths from the requests."""
    engine = of_recipe.model_dump()
    if adaptive := engine.get("adaptive_tp"):
        longest = adaptive["max_response_tokens"] or config.sampling.max_new_tokens
        engine["adaptive_tp"] = adaptive | {"max_response_tokens": longest}
    return engine
