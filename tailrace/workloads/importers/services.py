"""Requests of services, one response a prompt: the Azure LLM inference trace of 2023, and Mooncake's.

    Azure      CSV: TIMESTAMP, ContextTokens, GeneratedTokens
    Mooncake   JSON lines: timestamp in ms, input_length, output_length

A service has no steps, so all is step 0, and every request is a group of one sample. `start` is when a request came,
in seconds since the first.
"""

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Annotated

import msgspec
import polars as pl

from tailrace.errors import UNREADABLE, TraceError, one_line
from tailrace.workloads.importers.base import Importer, lines, records
from tailrace.workloads.trace import Provenance, Trace

_AZURE = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]


class Azure(Importer):
    """Reads the Azure LLM inference trace of 2023."""

    name = "azure"

    def reads(self, first: bytes) -> bool:
        """See `Importer`."""
        return first.decode(errors="replace").strip().split(",") == _AZURE

    def read(self, files: Sequence[Path], provenance: Provenance) -> Trace:
        """See `Importer`."""
        return _service(pl.concat([_azure(file) for file in files]), provenance)


def _azure(file: Path) -> pl.DataFrame:
    text = b"".join(line.rstrip(b"\r\n") + b"\n" for _, line in lines(file))
    schema = {"TIMESTAMP": pl.String, "ContextTokens": pl.Int64, "GeneratedTokens": pl.Int64}
    try:
        frame = pl.read_csv(BytesIO(text), schema=schema)
        return frame.select(
            start=pl.col("TIMESTAMP").str.to_datetime("%Y-%m-%d %H:%M:%S%.f", time_unit="ns").dt.epoch("ns") / 1e9,
            prompt_tokens="ContextTokens",
            response_tokens="GeneratedTokens",
        )
    except pl.exceptions.PolarsError as error:
        raise TraceError(f"{file} is not of the Azure trace ({', '.join(_AZURE)}): {one_line(error)}") from None


class _Request(msgspec.Struct):
    timestamp: Annotated[float, msgspec.Meta(ge=0.0)]
    """Milliseconds."""
    input_length: Annotated[int, msgspec.Meta(ge=1)]
    output_length: Annotated[int, msgspec.Meta(ge=1)]


class Mooncake(Importer):
    """Reads Mooncake's requests."""

    name = "mooncake"

    def reads(self, first: bytes) -> bool:
        """See `Importer`."""
        try:
            msgspec.json.decode(first, type=_Request)
        except UNREADABLE:
            return False
        return True

    def read(self, files: Sequence[Path], provenance: Provenance) -> Trace:
        """See `Importer`."""
        found = [record for file in files for _, record in records(file, _Request)]
        frame = pl.DataFrame(
            {
                "start": [record.timestamp / 1e3 for record in found],
                "prompt_tokens": [record.input_length for record in found],
                "response_tokens": [record.output_length for record in found],
            },
            schema={"start": pl.Float64, "prompt_tokens": pl.Int64, "response_tokens": pl.Int64},
        )
        return _service(frame, provenance)


def _service(requests: pl.DataFrame, provenance: Provenance) -> Trace:
    samples = requests.with_columns(
        pl.lit(0).alias("step"),
        pl.int_range(pl.len()).alias("group"),
        pl.lit(0).alias("sample"),
        (pl.col("start") - pl.col("start").min()).alias("start"),
    )
    return Trace.of(samples, msgspec.structs.replace(provenance, is_service=True))
