"""PolyTrace's records (Zhou-jiecheng/PolyTrace, section 5 of the paper), as JSON lines, a kind for each file.

    packed lengths   a prompt's length and those of its responses
    filter indices   which prompts of a step DAPO's filter has kept
    reward timings   seconds that a rank has graded its responses in
    conversations    a response with its turns and tool calls

Evaluations (`validate`) are left out. The prompts of a step are numbered rank by rank, as the filter's indices are.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import polars as pl

from tailrace.errors import TraceError
from tailrace.workloads.importers.base import Count, Importer, Length, Seconds, fields, lines, records
from tailrace.workloads.parts import as_lists
from tailrace.workloads.trace import TOOL_CALL, TURN, Provenance, Trace


class _Packed(msgspec.Struct):
    """The lengths of one prompt and its responses."""

    step: Count
    dp_rank: Count
    local_index: Count
    input: Length
    output: Annotated[list[Length], msgspec.Meta(min_length=1)]
    validate: bool = False


class _Kept(msgspec.Struct):
    """The prompts of a step that the filter has kept."""

    workload_step: Count
    prompt_count: Count
    kept_prompt_indices: list[Count]
    validate: bool = False


class _RewardTime(msgspec.Struct):
    """The time of grading the responses of a step on one rank."""

    step: Count
    dp_rank: Count
    reward_time_s: Seconds
    validate: bool = False


class _Turn(msgspec.Struct):
    prompt_tokens: Length
    completion_tokens: Count
    cached_tokens: Count | None = None
    engine_latency_s: Seconds | None = None


class _ToolCall(msgspec.Struct):
    turn: Count
    tool_name: str | None = None
    latency_s: Seconds | None = None
    response_token_len: Count | None = None
    status: str | None = None


class _Conversation(msgspec.Struct):
    """One response, turn by turn."""

    step: Count
    prompt_group_id: Count
    sample_id: Count
    prompt_len: Length
    turns: Annotated[list[_Turn], msgspec.Meta(min_length=1)]
    tool_calls: list[_ToolCall]
    finish_reason: str | None = None
    validate: bool = False


_Kind = type[_Packed] | type[_Kept] | type[_RewardTime] | type[_Conversation]
_KINDS: Mapping[str, _Kind] = {
    "output": _Packed,
    "kept_prompt_indices": _Kept,
    "reward_time_s": _RewardTime,
    "prompt_group_id": _Conversation,
}
"""The kind of a record, by a field that no other kind has."""
_NAMES: Mapping[_Kind, str] = {
    _Packed: "packed lengths",
    _Kept: "filter indices",
    _RewardTime: "reward timings",
    _Conversation: "conversations",
}
"""What errors call the records of a kind."""


class PolyTrace(Importer):
    """Reads PolyTrace's files of one workload, in any order."""

    name = "polytrace"

    def reads(self, first: bytes) -> bool:
        """See `Importer`."""
        return _kind(first) is not None

    def read(self, files: Sequence[Path], provenance: Provenance) -> Trace:
        """See `Importer`."""
        found: dict[_Kind, list[Any]] = {kind: [] for kind in _KINDS.values()}
        seen: set[str] = set()
        for file in files:
            kind = self._kind_of(file)
            for number, record in records(file, kind):
                if not record.validate:
                    _check_new(record, seen, f"{file}, record {number}")
                    found[kind].append(record)
        if found[_Conversation]:
            if others := [_NAMES[kind] for kind in found if found[kind] and kind is not _Conversation]:
                raise TraceError(f"{files[0]} and others are conversations and {others[0]}; import them one by one")
            return Trace.of(_conversations(found[_Conversation]), provenance)
        if not found[_Packed]:
            raise TraceError(f"{files[0]} has no lengths of training; give packed lengths or conversations as well")
        samples = _packed(found[_Packed])
        return Trace.of(_graded(_filtered(samples, found[_Kept]), found[_RewardTime]).drop("dp_rank"), provenance)

    def _kind_of(self, file: Path) -> _Kind:
        for _, line in lines(file):
            if (kind := _kind(line)) is not None:
                return kind
            break
        raise TraceError(f"{file}, record 1, has none of PolyTrace's fields {', '.join(_KINDS)}")


def _kind(line: bytes) -> _Kind | None:
    names = fields(line)
    return next((kind for field, kind in _KINDS.items() if field in names), None)


def _check_new(record: object, seen: set[str], where: str) -> None:
    """Add a prompt of packed lengths, or a step of a filter, to those `seen`; raise a TraceError where it is there."""
    if isinstance(record, _Packed):
        name = f"step {record.step} has the prompt {record.local_index} of rank {record.dp_rank}"
    elif isinstance(record, _Kept):
        name = f"step {record.workload_step} has the filter's indices"
    else:
        return
    if name in seen:
        raise TraceError(f"{where}: {name} already")
    seen.add(name)


def _packed(found: Sequence[_Packed]) -> pl.DataFrame:
    """One row a response; `group` is the number of the prompt in its step."""
    ordered = sorted(found, key=lambda record: (record.step, record.dp_rank, record.local_index))
    frame = pl.DataFrame(
        {
            "step": [record.step for record in ordered],
            "dp_rank": [record.dp_rank for record in ordered],
            "prompt_tokens": [record.input for record in ordered],
            "response_tokens": [record.output for record in ordered],
        }
    )
    numbered = frame.with_columns(
        pl.int_range(pl.len()).over("step").alias("group"),
        pl.int_ranges(pl.col("response_tokens").list.len()).alias("sample"),
    )
    return numbered.explode("response_tokens", "sample")


def _filtered(samples: pl.DataFrame, found: Iterable[_Kept]) -> pl.DataFrame:
    """Add `kept` for the steps that the filter's files name."""
    prompts = dict(samples.group_by("step").agg(pl.col("group").n_unique()).iter_rows())
    groups: list[tuple[int, int, bool]] = []
    for record in found:
        _check_prompts(record, prompts.get(record.workload_step))
        kept = set(record.kept_prompt_indices)
        groups += [(record.workload_step, index, index in kept) for index in range(record.prompt_count)]
    if not groups:
        return samples
    known = pl.DataFrame(groups, schema=["step", "group", "kept"], orient="row")
    return samples.join(known, on=["step", "group"], how="left")


def _check_prompts(record: _Kept, prompts: int | None) -> None:
    """Check the filter's numbers of a step. `prompts`: those of its packed lengths; None without any."""
    where, count = f"the filter of step {record.workload_step}", record.prompt_count
    if prompts is not None and prompts != count:
        raise TraceError(f"{where} has a prompt_count of {count}, and the packed lengths have {prompts} prompts")
    if (most := max(record.kept_prompt_indices, default=0)) >= max(1, count):
        raise TraceError(f"{where} has {most} in kept_prompt_indices; expected numbers below prompt_count, {count}")


def _graded(samples: pl.DataFrame, found: Iterable[_RewardTime]) -> pl.DataFrame:
    """Add `reward_s` for the steps and ranks that the timings name.

    A rank's responses are graded together, so each has its part of the rank's time.
    """
    times = [(record.step, record.dp_rank, record.reward_time_s) for record in found]
    if not times:
        return samples
    known = pl.DataFrame(times, schema=["step", "dp_rank", "reward_s"], orient="row")
    longest = known.group_by("step", "dp_rank").agg(pl.col("reward_s").max())
    joined = samples.join(longest, on=["step", "dp_rank"], how="left")
    return joined.with_columns(pl.col("reward_s") / pl.len().over("step", "dp_rank"))


def _conversations(found: Sequence[_Conversation]) -> pl.DataFrame:
    """One row a response, from columns of all turns and all calls: dictionaries would take about twice as long."""
    turns = [turn for record in found for turn in record.turns]
    calls = [call for record in found for call in record.tool_calls]
    samples = pl.DataFrame(
        {
            "step": [record.step for record in found],
            "group": [record.prompt_group_id for record in found],
            "sample": [record.sample_id for record in found],
            "prompt_tokens": [record.prompt_len for record in found],
            "response_tokens": [sum([turn.completion_tokens for turn in record.turns]) for record in found],
            "finish_reason": [record.finish_reason for record in found],
        }
    )
    of_turns = {
        "prompt_tokens": [turn.prompt_tokens for turn in turns],
        "cached_tokens": [turn.cached_tokens for turn in turns],
        "generated_tokens": [turn.completion_tokens for turn in turns],
        "engine_s": [turn.engine_latency_s for turn in turns],
    }
    of_calls = {
        "turn": [call.turn for call in calls],
        "name": [call.tool_name for call in calls],
        "seconds": [call.latency_s for call in calls],
        "returned_tokens": [call.response_token_len for call in calls],
        "status": [call.status for call in calls],
    }
    return samples.with_columns(
        as_lists(of_turns, TURN, [len(record.turns) for record in found]).alias("turns"),
        as_lists(of_calls, TOOL_CALL, [len(record.tool_calls) for record in found]).alias("tool_calls"),
    )
