"""One line a group, `{"group": 3, "prompt_len": 120, "out_lens": [410, 388]}`, and optionally its `step`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import polars as pl

from tailrace.errors import TraceError
from tailrace.workloads.importers.base import Count, Importer, Length, fields, records
from tailrace.workloads.trace import Provenance, Trace


class _Group(msgspec.Struct, forbid_unknown_fields=True):
    group: Count
    prompt_len: Length
    out_lens: Annotated[list[Length], msgspec.Meta(min_length=1)]
    step: Count = 0


class Groups(Importer):
    """Reads groups, a line each."""

    name = "groups"

    def reads(self, first: bytes) -> bool:
        """See `Importer`."""
        return "out_lens" in fields(first)

    def read(self, files: Sequence[Path], provenance: Provenance) -> Trace:
        """See `Importer`."""
        found: dict[tuple[int, int], _Group] = {}
        for file in files:
            for number, record in records(file, _Group):
                if found.setdefault((record.step, record.group), record) is not record:
                    raise TraceError(f"{file}, record {number}: step {record.step} has group {record.group} already")
        groups = list(found.values())
        frame = pl.DataFrame(
            {
                "step": [group.step for group in groups],
                "group": [group.group for group in groups],
                "prompt_tokens": [group.prompt_len for group in groups],
                "response_tokens": [group.out_lens for group in groups],
            },
            schema={
                "step": pl.Int32,
                "group": pl.Int64,
                "prompt_tokens": pl.Int32,
                "response_tokens": pl.List(pl.Int32),
            },
        )
        numbered = frame.with_columns(pl.int_ranges(pl.col("response_tokens").list.len()).alias("sample"))
        return Trace.of(numbered.explode("response_tokens", "sample"), provenance)
