"""Traces of others are read as they are, and what is not of their format is named."""

import gzip
import json
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tailrace.errors import TraceError
from tailrace.workloads.files import write_trace
from tailrace.workloads.importers.factory import import_trace
from tailrace.workloads.trace import Provenance, Trace

HERE = Provenance(source="here")
PACKED: dict[str, Any] = {"step": 3, "rank": 0, "dp_rank": 0, "tp_rank": 0, "local_index": 0, "input": 10}
PACKED |= {"output": [5, 7], "n_sampling": 2, "validate": False}
TALK: dict[str, Any] = {
    "step": 1,
    "prompt_len": 9,
    "turns": [
        {"turn": 0, "prompt_tokens": 9, "cached_tokens": 0, "completion_tokens": 4, "engine_latency_s": 0.5},
        {"turn": 1, "prompt_tokens": 30, "cached_tokens": 12, "completion_tokens": 6, "engine_latency_s": 0.25},
    ],
    "tool_calls": [{"turn": 0, "tool_name": "search", "latency_s": 0.1, "response_token_len": 15, "status": "success"}],
    "finish_reason": "stop",
    "validate": False,
    "prompt_group_id": 2,
    "sample_id": 1,
}


def written(path: Path, records: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def columns(trace: Trace, *names: str) -> list[tuple[Any, ...]]:
    return trace.samples.select(names).rows()


def test_packed_lengths_are_groups_in_the_order_of_ranks(tmp_path: Path) -> None:
    other = PACKED | {"dp_rank": 1, "rank": 4, "input": 20, "output": [1, 2]}
    second = PACKED | {"local_index": 1, "input": 11, "output": [3, 4]}
    evaluated = PACKED | {"validate": True, "local_index": 2}
    file = written(tmp_path / "packed_lengths_step_3.jsonl", [other, second, evaluated, PACKED])
    trace = import_trace([file], HERE)
    assert columns(trace, "step", "group", "sample", "prompt_tokens", "response_tokens") == [
        (3, 0, 0, 10, 5),
        (3, 0, 1, 10, 7),
        (3, 1, 0, 11, 3),
        (3, 1, 1, 11, 4),
        (3, 2, 0, 20, 1),
        (3, 2, 1, 20, 2),
    ]


def test_a_filter_and_timings_of_rewards_join_their_groups_and_ranks(tmp_path: Path) -> None:
    other = PACKED | {"dp_rank": 1, "output": [1]}
    packed = written(tmp_path / "packed.jsonl", [PACKED, other, PACKED | {"step": 4}])
    kept = written(tmp_path / "kept.jsonl", [{"workload_step": 3, "prompt_count": 2, "kept_prompt_indices": [1]}])
    timings = written(
        tmp_path / "timings.jsonl",
        [{"step": 3, "dp_rank": 0, "reward_time_s": 1.5}, {"step": 3, "dp_rank": 0, "reward_time_s": 2.5}],
    )
    trace = import_trace([packed, kept, timings], HERE)
    assert columns(trace, "step", "group", "kept", "reward_s") == [
        (3, 0, False, 1.25),
        (3, 0, False, 1.25),
        (3, 1, True, None),
        (4, 0, None, None),
        (4, 0, None, None),
    ]


def test_conversations_keep_their_turns_and_calls(tmp_path: Path) -> None:
    file = tmp_path / "multiturn_workload_step_1.jsonl.gz"
    silent = TALK | {"sample_id": 0, "turns": TALK["turns"][:1], "tool_calls": []}
    with gzip.open(file, "wt") as packed:
        packed.writelines(json.dumps(record) + "\n" for record in (TALK, silent))
    [first, sample] = import_trace([file], HERE).samples.rows(named=True)
    assert (first["response_tokens"], len(first["turns"]), first["tool_calls"]) == (4, 1, None)
    known = {name: value for name, value in sample.items() if value is not None}
    assert known == {
        "step": 1,
        "group": 2,
        "sample": 1,
        "prompt_tokens": 9,
        "response_tokens": 10,
        "finish_reason": "stop",
        "turns": [
            {"prompt_tokens": 9, "cached_tokens": 0, "generated_tokens": 4, "engine_s": 0.5},
            {"prompt_tokens": 30, "cached_tokens": 12, "generated_tokens": 6, "engine_s": 0.25},
        ],
        "tool_calls": [
            {
                "turn": 0,
                "name": "search",
                "seconds": 0.1,
                "returned_tokens": 15,
                "status": "success",
                "cached": None,
            }
        ],
    }


def test_groups_are_a_line_each(tmp_path: Path) -> None:
    lines = [{"group": 4, "prompt_len": 10, "out_lens": [3, 1]}, {"group": 2, "prompt_len": 8, "out_lens": [2]}]
    trace = import_trace([written(tmp_path / "groups.jsonl", lines)], HERE)
    assert columns(trace, "step", "group", "sample", "prompt_tokens", "response_tokens") == [
        (0, 2, 0, 8, 2),
        (0, 4, 0, 10, 3),
        (0, 4, 1, 10, 1),
    ]


def test_requests_of_services_are_groups_of_one(tmp_path: Path) -> None:
    azure = tmp_path / "azure.csv"
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
        "2023-11-16 18:17:03.9799600,4808,10\r\n"
        "2023-11-16 18:17:04.2299600,3180,8"  # without a newline, as the last line of the trace is
    )
    requests = [
        {"timestamp": 500, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1]},
        {"timestamp": 750, "input_length": 7322, "output_length": 490, "hash_ids": [0]},
    ]
    for file, lengths in {
        azure: [(4808, 10), (3180, 8)],
        written(tmp_path / "mooncake.jsonl", requests): [(6758, 500), (7322, 490)],
    }.items():
        trace = import_trace([file], HERE)
        assert columns(trace, "step", "group", "sample") == [(0, 0, 0), (0, 1, 0)]
        assert columns(trace, "prompt_tokens", "response_tokens") == lengths
        assert trace.samples["start"].to_list() == pytest.approx([0.0, 0.25])
        assert trace.provenance.is_service


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (PACKED | {"output": [5, -1]}, "record 2: Expected `int` >= 1 - at `$.output["),
        (PACKED | {"output": []}, "record 2: Expected `array` of length >= 1 - at `$.output`"),
        (PACKED | {"input": "ten"}, "record 2: Expected `int`, got `str` - at `$.input`"),
        ({"output": [5]}, "record 2: Object missing required field"),
        (PACKED, "record 2: step 3 has the prompt 0 of rank 0 already"),
        (PACKED | {"input": 2**31}, "record 2: Expected `int` <= 2147483647 - at `$.input`"),
    ],
)
def test_a_record_that_is_not_of_the_format_is_named(tmp_path: Path, record: dict[str, Any], message: str) -> None:
    file = written(tmp_path / "packed.jsonl", [PACKED, record])
    with pytest.raises(TraceError, match=re.escape(message)):
        import_trace([file], HERE)


def test_a_file_that_nobody_knows_is_named(tmp_path: Path) -> None:
    file = written(tmp_path / "foreign.jsonl", [{"tokens": 5}])
    with pytest.raises(
        TraceError, match=re.escape(f"{file} does not begin as one of polytrace, groups, azure, mooncake")
    ):
        import_trace([file], HERE)
    with pytest.raises(TraceError, match=re.escape(f"{file}, record 1, has none of PolyTrace's fields")):
        import_trace([file], HERE, format="polytrace")
    with pytest.raises(TraceError, match=r"format 'polytrce' is none of .*; did you mean 'polytrace'\?"):
        import_trace([file], HERE, format="polytrce")
    with pytest.raises(TraceError, match="does not exist"):
        import_trace([tmp_path / "nothing.jsonl"], HERE)
    with pytest.raises(TraceError, match="there is no file to import"):
        import_trace([], HERE)
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(TraceError, match=r"empty\.jsonl is empty; a trace needs at least one sample"):
        import_trace([tmp_path / "empty.jsonl"], HERE)
    cut = tmp_path / "cut.jsonl.gz"
    whole = gzip.compress(json.dumps(TALK).encode())
    for damaged in (whole[:-10], whole[:30] + b"\xff" * 30 + whole[60:]):
        cut.write_bytes(damaged)
        with pytest.raises(TraceError, match=re.escape(f"{cut} cannot be read, or is damaged")):
            import_trace([cut], HERE)


def test_a_trace_of_tailrace_needs_no_import(tmp_path: Path) -> None:
    trace = import_trace([written(tmp_path / "packed.jsonl", [PACKED])], HERE)
    for name, message in {
        "a.jsonl": "is a trace of Tailrace already; give it to a command as it is",
        "a.parquet": "is a Parquet file, as no format is; a trace of Tailrace needs no import",
    }.items():
        write_trace(trace, tmp_path / name)
        with pytest.raises(TraceError, match=re.escape(f"{tmp_path / name} {message}")):
            import_trace([tmp_path / name], HERE)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("2023-11-16 18:17:03.97,5", "record 3, has 2 fields; expected TIMESTAMP, ContextTokens, GeneratedTokens"),
        ("yesterday,5,7", "record 3: TIMESTAMP is 'yesterday'; expected a date and a time"),
        ("2023-11-16 18:17:03.97,5,many", "record 3: GeneratedTokens is 'many'; Expected `int`, got `str`"),
        ("2023-11-16 18:17:03.97,0,5", "record 3: ContextTokens is '0'; Expected `int` >= 1"),
    ],
)
def test_a_request_of_azure_that_cannot_be_is_named(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "azure.csv"
    file.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n{line}\n")
    with pytest.raises(TraceError, match=re.escape(message)):
        import_trace([file], HERE)


def test_times_of_azure_are_the_same_in_every_time_zone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "azure.csv"
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens", "2023-10-29 00:30:00,5,6", "2023-10-29 03:30:00,5,6"]
    file.write_text("\n".join(lines))
    monkeypatch.setenv("TZ", "Europe/Berlin")  # an hour of that night was there twice
    time.tzset()
    try:
        assert import_trace([file], HERE).samples["start"].to_list() == [0.0, 10_800.0]
    finally:
        monkeypatch.undo()
        time.tzset()


def test_a_filter_alone_is_no_trace(tmp_path: Path) -> None:
    kept = written(tmp_path / "kept.jsonl", [{"workload_step": 3, "prompt_count": 2, "kept_prompt_indices": [1]}])
    with pytest.raises(TraceError, match="has no lengths of training; give packed lengths or conversations as well"):
        import_trace([kept], HERE)


def test_a_filter_that_does_not_fit_its_lengths_is_one_line(tmp_path: Path) -> None:
    packed = written(tmp_path / "packed.jsonl", [PACKED])

    def refused(*records: dict[str, Any]) -> str:
        kept = written(tmp_path / "kept.jsonl", [{"workload_step": 3, "kept_prompt_indices": [0]} | r for r in records])
        with pytest.raises(TraceError) as caught:
            import_trace([packed, kept], HERE)
        return str(caught.value)

    assert "step 3 has a prompt_count of 2, and the packed lengths have 1 prompts" in refused({"prompt_count": 2})
    assert "step 3 has 5 in kept_prompt_indices; expected numbers below prompt_count, 1" in refused(
        {"prompt_count": 1, "kept_prompt_indices": [5]}
    )
    assert "record 2: step 3 has the filter's indices already" in refused(*[{"prompt_count": 1}] * 2)


def test_packed_lengths_and_conversations_are_two_traces(tmp_path: Path) -> None:
    files = [written(tmp_path / "a.jsonl", [PACKED]), written(tmp_path / "b.jsonl", [TALK])]
    with pytest.raises(TraceError, match="are conversations and packed lengths; import them one by one"):
        import_trace(files, HERE)
    files[0] = written(tmp_path / "a.jsonl", [{"step": 3, "dp_rank": 0, "reward_time_s": 1.5}])
    with pytest.raises(TraceError, match="are conversations and reward timings; import them one by one"):
        import_trace(files, HERE)


DATA = Path(os.environ.get("TAILRACE_DATA", "/nonexistent"))


@pytest.mark.skipif(not DATA.is_dir(), reason="TAILRACE_DATA does not name the folder of public traces")
@pytest.mark.parametrize(
    ("pattern", "samples", "figures"),
    [
        ("polytrace/dapo_math_32b/*.jsonl", 4608, {"mean": 581, "50": 465, "90": 1041, "99": 2711, "max": 10112}),
        ("polytrace/video_7b/*.jsonl", 5120, {"mean": 170, "50": 159, "90": 226, "99": 306, "max": 16000}),
        ("polytrace/search_r1_7b/*", 2048 + 2048 + 47, {}),
        ("lengths/azure_llm_2023/*conv.csv", 19366, {"mean": 211, "99": 601, "max": 1000}),
        ("lengths/azure_llm_2023/*code.csv", 8819, {"mean": 28, "99": 252}),
        ("lengths/mooncake/*.jsonl", 5000, {"mean": 346, "max": 2000}),
    ],
)
def test_public_traces_have_the_figures_of_their_pages(pattern: str, samples: int, figures: dict[str, int]) -> None:
    trace = import_trace(sorted(DATA.glob(pattern)), Provenance(source=pattern))
    lengths = trace.samples["response_tokens"].to_numpy()
    found = {"mean": lengths.mean(), "max": lengths.max()} | {
        q: np.percentile(lengths, int(q)) for q in ("50", "90", "99")
    }
    assert len(trace) == samples
    assert {name: float(found[name]) for name in figures} == pytest.approx(figures, abs=1)
