"""A trace: the samples of an RL run, with lengths and times and without texts.

A row is one sample. Times are optional: a step's samples arrive together (PolyTrace, section 2.2). A trace carries its
provenance, so that a figure can be followed to where it came from.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import msgspec
import polars as pl
from polars.datatypes import DataTypeClass

from tailrace.errors import TraceError
from tailrace.types import FinishReason

FORMAT = 1
"""The version of the schema, in every file."""

TURN = pl.Struct(
    {
        "prompt_tokens": pl.Int32,
        "cached_tokens": pl.Int32,
        "generated_tokens": pl.Int32,
        "engine_s": pl.Float64,
    }
)
"""One turn: the tokens that the model read, those of them that its cache held, the tokens that it generated, and the
seconds of the engine."""

TOOL_CALL = pl.Struct(
    {
        "turn": pl.Int32,
        "name": pl.String,
        "seconds": pl.Float64,
        "returned_tokens": pl.Int32,
        "status": pl.String,
        "cached": pl.Boolean,
    }
)
"""One call of a tool, after the turn of that number (from 0)."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a trace."""

    dtype: pl.DataType
    meaning: str
    is_required: bool = False


COLUMNS: Mapping[str, Column] = {
    "step": Column(pl.Int32(), "Training step, from 0.", is_required=True),
    "group": Column(pl.Int64(), "The samples of one prompt in one step have the same number.", is_required=True),
    "sample": Column(pl.Int32(), "Number of the sample in its group, from 0.", is_required=True),
    "task": Column(pl.String(), "Kind of task, such as mathematics."),
    "prompt_tokens": Column(pl.Int32(), "Tokens of the prompt, before the first turn.", is_required=True),
    "response_tokens": Column(pl.Int32(), "Tokens that the policy generated, in all turns.", is_required=True),
    "finish_reason": Column(pl.String(), "Why the response ended: stop, length or abort."),
    "reward": Column(pl.Float64(), "The reward."),
    "reward_s": Column(pl.Float64(), "Seconds that its grading took."),
    "kept": Column(pl.Boolean(), "Whether the algorithm trained on the sample; false where its group was filtered."),
    "first_version": Column(pl.Int32(), "The oldest weight version that made one of the tokens."),
    "last_version": Column(pl.Int32(), "The newest one."),
    "start": Column(pl.Float64(), "Seconds at which generation began, since the start of the trace."),
    "end": Column(pl.Float64(), "Seconds at which the response was finished."),
    "turns": Column(pl.List(TURN), "The turns of a conversation; null for a single one without details."),
    "tool_calls": Column(pl.List(TOOL_CALL), "The calls of tools, in their order; null for none."),
}
"""All columns, in their order. A column that is not required may be null in any row."""


class Provenance(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Where a trace came from. Empty and None mean unknown."""

    source: str
    """The files, the run or the service."""
    model: str = ""
    hardware: str = ""
    algorithm: str = ""
    licence: str = ""
    context: int | None = None
    """Most tokens of a prompt and its response together."""
    max_new_tokens: int | None = None
    """Most tokens of a response; longer ones were cut off."""
    is_service: bool = False
    """Whether requests of a service came one by one: no steps, and one sample a group."""


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """The samples of one workload, in the order of step, group and sample. Make it with `Trace.of`."""

    samples: pl.DataFrame
    """The columns of `COLUMNS`, all of them."""
    provenance: Provenance

    @classmethod
    def of(cls, samples: pl.DataFrame, provenance: Provenance) -> Self:
        """Make a trace of samples that have at least the required columns. The others become null.

        Raises:
            TraceError: there are no samples, a column is unknown or missing, or a value cannot be. The message names
                the row, by its place from 1, and the column.
        """
        trace = cls(_complete(samples, provenance.source), provenance)
        _check(trace)
        return replace(trace, samples=trace.samples.sort("step", "group", "sample", maintain_order=True))

    def __len__(self) -> int:
        """The number of samples."""
        return len(self.samples)

    @property
    def steps(self) -> list[int]:
        """The numbers of the steps, ascending."""
        return self.samples["step"].unique().sort().to_list()

    @property
    def groups(self) -> int:
        """The number of groups, in all steps together."""
        return int(self.samples.select(pl.struct("step", "group").n_unique()).item())


def _complete(samples: pl.DataFrame, source: str) -> pl.DataFrame:
    if samples.is_empty():
        raise TraceError(f"{source} has no samples; a trace needs at least one")
    if unknown := set(samples.columns) - COLUMNS.keys():
        raise TraceError(f"{source} has the column {min(unknown)!r}; a trace has {', '.join(COLUMNS)}")
    missing = [name for name, column in COLUMNS.items() if column.is_required and name not in samples.columns]
    if missing:
        raise TraceError(f"{source} has no column {missing[0]!r}, which every sample needs")
    absent = [pl.lit(None, column.dtype).alias(name) for name, column in COLUMNS.items() if name not in samples.columns]
    whole = samples.with_columns(absent).select(*COLUMNS)
    cast = pl.DataFrame([_cast(whole[name], column.dtype, source) for name, column in COLUMNS.items()])
    empty = [pl.when(pl.col(name).list.len() > 0).then(name) for name in _PARTS]
    return cast.with_columns(empty)


def _cast(column: pl.Series, dtype: pl.DataType, source: str) -> pl.Series:
    """Give a column its type, or raise a TraceError where that would change a value."""
    try:
        cast = column.cast(dtype)
        changed = column.ne_missing(cast.cast(column.dtype)).arg_true() if _holds(dtype, column.dtype) else None
    except pl.exceptions.PolarsError:
        changed = None
    if changed is None:
        raise TraceError(f"{source} has {column.dtype} in the column {column.name!r}; expected {dtype}")
    if len(changed):
        place = changed[0]
        raise TraceError(f"{source}, row {place + 1}: {column.name} is {column[place]}; expected {dtype}")
    return cast


def _holds(dtype: pl.DataType, given: pl.DataType) -> bool:
    """Whether values of a given type can be those of `dtype`: polars would make numbers of texts and of truths."""
    if given == pl.Null:
        return True
    if isinstance(dtype, pl.List):
        return isinstance(given, pl.List) and _holds(_type(dtype.inner), _type(given.inner))
    if isinstance(dtype, pl.Struct):
        known = {field.name: _type(field.dtype) for field in dtype.fields}
        return isinstance(given, pl.Struct) and all(
            field.name in known and _holds(known[field.name], _type(field.dtype)) for field in given.fields
        )
    return given.is_numeric() if dtype.is_numeric() else type(given) is type(dtype)


def _type(dtype: pl.DataType | DataTypeClass) -> pl.DataType:
    return dtype() if isinstance(dtype, type) else dtype


@dataclass(frozen=True, slots=True)
class _Rule:
    """A condition that no sample may meet."""

    column: str
    broken: pl.Expr
    expected: str
    """What the value should be."""


def _rules(provenance: Provenance) -> list[_Rule]:
    least = {"step": 0, "group": 0, "sample": 0, "prompt_tokens": 1, "response_tokens": 1}
    least |= {"reward_s": 0, "first_version": 0, "last_version": 0, "start": 0, "end": 0}
    reasons = [reason.value for reason in FinishReason]
    return [
        *(_Rule(name, pl.col(name).is_null(), "a number") for name, column in COLUMNS.items() if column.is_required),
        *(_Rule(name, pl.col(name) < number, f"{number} or more") for name, number in least.items()),
        *(_Rule(name, ~pl.col(name).is_finite(), "a finite number") for name in ("reward", "reward_s", "start", "end")),
        _Rule("finish_reason", ~pl.col("finish_reason").is_in(reasons), f"one of {', '.join(reasons)}"),
        _Rule("end", pl.col("end") < pl.col("start"), "a time after `start`"),
        _Rule("last_version", pl.col("last_version") < pl.col("first_version"), "`first_version` or newer"),
        *_limits(provenance),
    ]


def _limits(provenance: Provenance) -> Iterator[_Rule]:
    response = pl.col("response_tokens").cast(pl.Int64)
    if (limit := provenance.max_new_tokens) is not None:
        yield _Rule("response_tokens", response > limit, f"at most max_new_tokens, {limit}")
    if (limit := provenance.context) is not None:
        whole = response + pl.col("prompt_tokens")
        yield _Rule("response_tokens", whole > limit, f"with its prompt at most the context of {limit}")


_PARTS = {
    "turns": ("prompt_tokens", "cached_tokens", "generated_tokens", "engine_s"),
    "tool_calls": ("turn", "seconds", "returned_tokens"),
}
"""The fields of turns and tool calls that are numbers, none of them negative."""


_OF_TURNS = pl.col("turns").list.eval(pl.element().struct.field("generated_tokens").cast(pl.Int64))
_GENERATED = pl.when(_OF_TURNS.list.drop_nulls().list.len() == _OF_TURNS.list.len()).then(_OF_TURNS.list.sum())
"""Tokens of all turns; null where those of a turn are unknown."""


def _check(trace: Trace) -> None:
    """Raise a TraceError for the first sample that breaks a rule, and for two samples with one number."""
    for rule in _rules(trace.provenance):
        if (sample := _first(trace, rule.broken)) is not None:
            raise _error(trace, sample, rule.column, sample[rule.column], rule.expected)
    for column, fields in _PARTS.items():
        for field in fields:
            value = pl.element().struct.field(field)
            broken = pl.col(column).list.eval((value < 0) | ~value.is_finite()).list.any()
            if (sample := _first(trace, broken)) is not None:
                wrong = next(part[field] for part in sample[column] if not _is_amount(part[field]))
                raise _error(trace, sample, f"{column}.{field}", wrong, "0 or more")
    if (sample := _first(trace, pl.col("response_tokens") != _GENERATED)) is not None:
        found = sample["response_tokens"]
        raise _error(trace, sample, "response_tokens", found, "the sum of the `generated_tokens` of its turns")
    if (sample := _first(trace, ~pl.struct("step", "group", "sample").is_first_distinct())) is not None:
        raise TraceError(f"{_where(trace, sample)} was there before; number the samples of a group")


_PLACE = "row"


def _first(trace: Trace, broken: pl.Expr) -> dict[str, Any] | None:
    """The first sample for which `broken` holds, with its place from 1; None where there is none."""
    found = trace.samples.with_row_index(_PLACE, 1).filter(broken).head(1)
    return None if found.is_empty() else found.row(0, named=True)


def _is_amount(value: float | None) -> bool:
    return value is None or (math.isfinite(value) and value >= 0)


def _error(trace: Trace, sample: Mapping[str, Any], name: str, value: object, expected: str) -> TraceError:
    return TraceError(f"{_where(trace, sample)}: {name} is {value}; expected {expected}")


def _where(trace: Trace, sample: Mapping[str, Any]) -> str:
    numbers = f"step {sample['step']}, group {sample['group']}, sample {sample['sample']}"
    return f"{trace.provenance.source}, row {sample[_PLACE]} ({numbers})"
