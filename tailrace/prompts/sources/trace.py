"""Prompts of the lengths of a trace."""

from collections.abc import Iterator
from pathlib import Path

from tailrace.config.prompts import TraceSource
from tailrace.prompts.sources.base import Row
from tailrace.workloads.files import read_trace


def trace_rows(config: TraceSource) -> Iterator[Row]:
    """Yield a row for each group of the trace, by step and group, with a number of tokens in place of a prompt.

    Raises:
        TraceError: the file is not a trace, or damaged.
    """
    first = read_trace(Path(config.path)).samples.unique(["step", "group"], keep="first", maintain_order=True)
    for step, group, tokens in first.select("step", "group", "prompt_tokens").iter_rows():
        yield Row(prompt_id=f"{config.path}, step {step}, group {group}", prompt="", tokens=tokens)
