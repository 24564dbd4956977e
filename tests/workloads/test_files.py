"""A trace in a file is the same trace."""

import re
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.errors import TraceError
from tailrace.workloads.files import read_trace, write_trace
from tailrace.workloads.trace import COLUMNS, Provenance, Trace

MAYBE = st.none() | st.integers(0, 2**31 - 1)
SECONDS = st.none() | st.floats(0, 1e9)
TURNS = st.lists(
    st.fixed_dictionaries(
        {"prompt_tokens": MAYBE, "cached_tokens": MAYBE, "generated_tokens": MAYBE, "engine_s": SECONDS}
    )
)
CALLS = st.lists(
    st.fixed_dictionaries(
        {
            "turn": MAYBE,
            "name": st.none() | st.text(),
            "seconds": SECONDS,
            "returned_tokens": MAYBE,
            "status": st.none() | st.text(),
            "cached": st.none() | st.booleans(),
        }
    )
)
SAMPLES = st.fixed_dictionaries(
    {
        "step": st.integers(0, 2**31 - 1),
        "group": st.integers(0, 2**63 - 1),
        "prompt_tokens": st.integers(1, 2**31 - 1),
        "response_tokens": st.integers(1, 2**31 - 1),
        "task": st.none() | st.text(),
        "finish_reason": st.none() | st.sampled_from(["stop", "length", "abort"]),
        "reward": st.none() | st.floats(allow_nan=False, allow_infinity=False),
        "kept": st.none() | st.booleans(),
        "turns": st.none() | TURNS,
        "tool_calls": st.none() | CALLS,
    }
)


def made(samples: list[dict[str, Any]]) -> Trace:
    schema = {name: column.dtype for name, column in COLUMNS.items() if name in {"sample", *samples[0]}}
    rows = [{**sample, "sample": number} for number, sample in enumerate(samples)]
    for row in rows:
        made_by_turns = [turn["generated_tokens"] for turn in row.get("turns") or [{"generated_tokens": None}]]
        if None not in made_by_turns:  # the response is what its turns have generated
            row["response_tokens"] = min(2**31 - 1, max(1, sum(made_by_turns)))
            row["turns"] = row["turns"] if row["response_tokens"] == sum(made_by_turns) else None
    return Trace.of(pl.DataFrame(rows, schema=schema), Provenance(source="test", model="a model", context=2**33))


@given(st.lists(SAMPLES, min_size=1, max_size=5))
def test_a_trace_is_read_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, samples: list[dict[str, Any]]
) -> None:
    directory = tmp_path_factory.mktemp("traces")
    trace = made(samples)
    for name in ("a.parquet", "a.jsonl"):
        write_trace(trace, directory / name)
        read = read_trace(directory / name)
        assert read_trace(str(directory / name)).samples.equals(read.samples)
        assert read.provenance == trace.provenance
        assert read.samples.equals(trace.samples)


@pytest.fixture
def trace() -> Trace:
    return made([{"step": 0, "group": 0, "prompt_tokens": 3, "response_tokens": 4}])


def test_a_name_says_what_is_in_the_file(tmp_path: Path, trace: Trace) -> None:
    with pytest.raises(TraceError, match=r"give a name that ends in \.parquet or \.jsonl"):
        write_trace(trace, tmp_path / "trace.csv")
    assert not list(tmp_path.iterdir())
    with pytest.raises(TraceError, match=r"give a name that ends in \.parquet or \.jsonl"):
        read_trace(tmp_path / "trace.csv")
    with pytest.raises(TraceError, match=f"is a directory; .* with `tailrace trace export {tmp_path}`"):
        read_trace(tmp_path)


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl"])
def test_a_file_that_is_no_trace_is_named(tmp_path: Path, trace: Trace, name: str) -> None:
    path = tmp_path / name
    with pytest.raises(TraceError, match=re.escape(f"{path} does not exist")):
        read_trace(path)
    path.touch()
    with pytest.raises(TraceError, match=re.escape(str(path))):
        read_trace(path)
    path.write_bytes(b"\x00\x01 no trace")
    with pytest.raises(TraceError, match=re.escape(str(path))):
        read_trace(path)
    write_trace(trace, path)
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(TraceError, match=re.escape(str(path))):
        read_trace(path)


def test_a_line_that_is_no_sample_is_named(tmp_path: Path, trace: Trace) -> None:
    path = tmp_path / "a.jsonl"
    write_trace(trace, path)
    whole = path.read_text()
    sample = "{'step': 1, 'group': 0, 'sample': 0, 'prompt_tokens': 3, 'response_tokens': 4"
    for line, message in {
        '{"step": 0': "record 2, is not a sample: Input data was truncated",
        "[]": "record 2, is not a sample: Expected `object`, got `array`",
        '{"step": "0"}': "record 2, is not a sample: Expected `int`, got `str` - at `$.step`",
        '{"step": 0}': "record 2, is not a sample: Object missing required field `group`",
        f"{sample}, 'text': 'a'}}": "record 2, is not a sample: Object contains unknown field `text`",
        f"{sample}, 'turns': [{{'engine_s': 'long'}}]}}": "Expected `float | null`, got `str`",
        f"{sample}, 'reward': 1, 'first_version': 3000000000}}": "has a number that is too large for its column",
        f"{sample}, 'response_tokens': -1}}": "row 2 (step 1, group 0, sample 0): response_tokens is -1; expected",
    }.items():
        path.write_text(whole + line.replace("'", '"') + "\n")
        with pytest.raises(TraceError, match=re.escape(message)):
            read_trace(path)


def test_a_trace_of_a_later_version_is_refused(tmp_path: Path, trace: Trace) -> None:
    path = tmp_path / "a.jsonl"
    write_trace(trace, path)
    path.write_text(path.read_text().replace('"tailrace_trace":1', '"tailrace_trace":2'))
    with pytest.raises(TraceError, match="is a trace of version 2, and this Tailrace reads 1"):
        read_trace(path)
