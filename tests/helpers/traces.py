"""Small traces in files."""

from pathlib import Path

import polars as pl

from tailrace.workloads.files import write_trace
from tailrace.workloads.trace import Provenance, Trace

LENGTHS = [[[30, 4], [5, 6], [7, 8]], [[9, 3], [11, 12], [13, 14]]]
"""Response tokens by step, group and sample."""


def write_lengths(path: Path, lengths: list[list[list[int]]] = LENGTHS) -> str:
    rows = [
        {"step": step, "group": group, "sample": sample, "prompt_tokens": 20 + group, "response_tokens": tokens}
        for step, groups in enumerate(lengths)
        for group, samples in enumerate(groups)
        for sample, tokens in enumerate(samples)
    ]
    write_trace(Trace.of(pl.DataFrame(rows), Provenance(source="made")), path)
    return str(path)
