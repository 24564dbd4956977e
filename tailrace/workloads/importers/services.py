"""Requests of services, one response a prompt: the Azure LLM inference trace of 2023, and Mooncake's.

    Azure      CSV: TIMESTAMP, ContextTokens, GeneratedTokens
    Mooncake   JSON lines: timestamp in ms, input_length, output_length

A service has no steps, so all is step 0, and every request is a group of one sample. `start` is when a request came,
in seconds since the first.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import msgspec
import polars as pl

from tailrace.errors import TraceError, one_line
from tailrace.workloads.importers.base import Importer, Length, fields, lines, records
from tailrace.workloads.trace import Provenance, Trace

_AZURE = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]
REQUEST = {"start": pl.Float64, "prompt_tokens": pl.Int64, "response_tokens": pl.Int64}
"""The columns of requests; `start` is in seconds."""


class Azure(Importer):
    """Reads the Azure LLM inference trace of 2023."""

    name = "azure"

    def reads(self, first: bytes) -> bool:
        """See `Importer`."""
        return _columns(first) == _AZURE

    def read(self, files: Sequence[Path], provenance: Provenance) -> Trace:
        """See `Importer`."""
        return as_service(pl.concat([_azure(file) for file in files]), provenance)


def _azure(file: Path) -> pl.DataFrame:
    table = lines(file)
    _, header = next(table, (0, b""))
    if _columns(header) != _AZURE:
        raise TraceError(f"{file} does not begin as the Azure trace, with {','.join(_AZURE)}")
    return pl.DataFrame([_azure_request(file, *line) for line in table], schema=REQUEST, orient="row")


def _columns(line: bytes) -> list[str]:
    return line.decode(errors="replace").strip().split(",")


def _moment(text: str) -> datetime:
    """Read a date and a time; without a zone it is UTC, so that no hour is missing or twice."""
    moment = datetime.fromisoformat(text)
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def _azure_request(file: Path, number: int, line: bytes) -> tuple[float, int, int]:
    texts = _columns(line)
    if len(texts) != len(_AZURE):
        raise TraceError(f"{file}, record {number}, has {len(texts)} fields; expected {', '.join(_AZURE)}")
    try:
        start = _moment(texts[0]).timestamp()
    except ValueError:
        raise TraceError(f"{file}, record {number}: {_AZURE[0]} is {texts[0]!r}; expected a date and a time") from None
    tokens = []
    for name, text in zip(_AZURE[1:], texts[1:], strict=True):
        try:
            tokens.append(msgspec.convert(text, Length, strict=False))
        except msgspec.ValidationError as error:
            raise TraceError(f"{file}, record {number}: {name} is {text!r}; {one_line(error)}") from None
    return start, tokens[0], tokens[1]


class _Request(msgspec.Struct):
    timestamp: Annotated[float, msgspec.Meta(ge=0.0)]
    """Milliseconds."""
    input_length: Length
    output_length: Length


class Mooncake(Importer):
    """Reads Mooncake's requests."""

    name = "mooncake"

    def reads(self, first: bytes) -> bool:
        """See `Importer`."""
        return {"timestamp", "input_length", "output_length"} <= fields(first)

    def read(self, files: Sequence[Path], provenance: Provenance) -> Trace:
        """See `Importer`."""
        found = [record for file in files for _, record in records(file, _Request)]
        frame = pl.DataFrame(
            {
                "start": [record.timestamp / 1e3 for record in found],
                "prompt_tokens": [record.input_length for record in found],
                "response_tokens": [record.output_length for record in found],
            },
            schema=REQUEST,
        )
        return as_service(frame, provenance)


def as_service(requests: pl.DataFrame, provenance: Provenance) -> Trace:
    """Return the trace of requests, which have the columns of `REQUEST`."""
    samples = requests.with_columns(
        pl.lit(0).alias("step"),
        pl.int_range(pl.len()).alias("group"),
        pl.lit(0).alias("sample"),
        (pl.col("start") - pl.col("start").min()).alias("start"),
    )
    return Trace.of(samples, msgspec.structs.replace(provenance, is_service=True))
