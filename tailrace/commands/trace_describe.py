"""`tailrace trace describe`: the figures of traces, side by side."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from tailrace.report.text import number, percent
from tailrace.workloads.characterization.description import Description
from tailrace.workloads.characterization.distribution import Distribution
from tailrace.workloads.files import read_trace


def describe(traces: Sequence[Path], *, as_json: bool = False) -> None:
    """Print the figures of traces: a column for each, or a JSON list.

    Raises:
        TraceError: one of them cannot be read.
    """
    descriptions = [Description.of(read_trace(path)) for path in traces]
    if as_json:
        print(msgspec.json.encode(descriptions).decode())
        return
    columns = [dict(figures(description)) for description in descriptions]
    table = Table(box=None, pad_edge=False, header_style="")
    table.add_column("")
    for path in traces:
        table.add_column(path.stem, justify="right")
    for name in dict.fromkeys(name for column in columns for name in column):
        table.add_row(name, *(column.get(name, "") for column in columns))
    Console().print(table)


def figures(description: Description) -> Iterator[tuple[str, str]]:
    """Yield each figure that a trace has, with its name, for people."""
    d = description
    yield "samples", f"{d.samples:,}"
    yield "groups", f"{d.groups:,}"
    yield "steps", f"{len(d.steps):,}"
    yield from _amounts("prompt tokens", d.prompt_tokens)
    yield from _amounts("response tokens", d.response_tokens)
    yield from _amounts("of correct samples", d.correct)
    yield from _amounts("of wrong samples", d.wrong)
    yield from _amounts("turns", d.turns)
    yield from _amounts("seconds of tools", d.tool_seconds)
    yield from _amounts("tokens from tools", d.returned_tokens)
    if d.correlation is not None:
        yield "correlation of prompt and response", f"{d.correlation:.2f}"
    if d.prompt_share is not None:
        yield "variance of log-length that the prompt explains", percent(d.prompt_share)
    for part, recall in d.longest_recall.items():
        yield f"longest {part} % found by a prompt's other samples", percent(recall)
    if d.tail_share is not None:
        yield "generation with fewer than a tenth running", percent(d.tail_share)
    if d.kept_share is not None:
        yield "kept by the filter", percent(d.kept_share)


def _amounts(name: str, distribution: Distribution | None) -> Iterator[tuple[str, str]]:
    if distribution is None:
        return
    yield f"{name}, mean", number(distribution.mean)
    for part in (50, 90, 99):
        yield f"{name}, p{part}", number(distribution.percentiles[part])
    yield f"{name}, most", number(distribution.most)
    yield f"{name}, most over p90", f"{distribution.tail:.1f}"
    yield f"{name}, variation", f"{distribution.variation:.2f}"
