"""`tailrace trace describe`: the figures of traces, side by side."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
from rich.console import Console

from tailrace.commands.files import check_apart, check_new_file
from tailrace.errors import UserError, counted, one_line
from tailrace.host.whole_file import whole_file
from tailrace.report.tables import figures_table
from tailrace.report.text import interval, number, percent, signed_percent
from tailrace.workloads.characterization.description import Description
from tailrace.workloads.characterization.distribution import Distribution
from tailrace.workloads.characterization.trend import TrendFigures
from tailrace.workloads.files import read_trace

_WIDEST = 10_000
"""Columns of a table that no terminal shows. Files and pipes have no width at which a row would have to be wrapped."""


def describe(traces: Sequence[Path], *, as_json: bool = False, html: Path | None = None, force: bool = False) -> None:
    """Print the figures of traces: a column for each, or a JSON list. With `html`, write a page of them and name it.

    Args:
        force: replace the page where it exists.

    Raises:
        UserError: one of the traces cannot be read, or the page cannot be made. Nothing is written.
    """
    if html is not None:
        check_new_file("--html", html, force=force)
        if html.is_file():
            check_apart("--html", html, traces)
    descriptions = dict(zip(_names(traces), [Description.of(read_trace(path)) for path in traces], strict=True))
    if html is not None:
        _write_page(descriptions, html)
    if as_json:
        print(msgspec.json.encode(list(descriptions.values())).decode())
    else:
        _print_table(descriptions)
        if html is not None:
            print(f"\n{html}: a page of {counted(len(traces), 'trace')}")


def _names(traces: Sequence[Path]) -> list[str]:
    """The names of the files; where two have one name, with their folders, and numbers for a trace given twice."""
    names = [path.stem for path in traces]
    if len(set(names)) < len(names):
        names = [f"{path.absolute().parent.name}/{path.stem}" for path in traces]
    return [name if names.count(name) == 1 else f"{name} ({number})" for number, name in enumerate(names, 1)]


def _write_page(descriptions: Mapping[str, Description], path: Path) -> None:
    from tailrace.report.workload.page import render  # plotly takes a while to import

    page = render(descriptions)
    try:
        with whole_file(path) as partial:
            partial.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--html {path} cannot be written: {error.strerror or one_line(error)}") from None


def _print_table(descriptions: Mapping[str, Description]) -> None:
    columns = [dict(figures(description)) for description in descriptions.values()]
    table = figures_table("", *descriptions)
    table.columns[0].no_wrap = True
    for figure in dict.fromkeys(figure for column in columns for figure in column):
        table.add_row(figure, *(column.get(figure, "") for column in columns))
    Console(width=None if sys.stdout and sys.stdout.isatty() else _WIDEST).print(table)


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
    yield from _of_conversations(d)
    yield from _of_prompts(d)
    if d.tail_share is not None:
        yield "generation with fewer than a tenth running", percent(d.tail_share)
    yield from _trend("prompt tokens", d.prompt_trend)
    yield from _trend("response tokens", d.response_trend)
    yield from _trend("turns", d.turns_trend)
    if d.kept_share is not None:
        yield "kept by the filter", percent(d.kept_share)
    if d.staleness is not None:
        yield "staleness, mean", number(d.staleness.mean)
        yield "staleness, most", number(d.staleness.most)


def _of_conversations(d: Description) -> Iterator[tuple[str, str]]:
    if d.turns is not None:
        yield from _amounts("turns", d.turns.counts)
        yield from _amounts("tokens of a turn", d.turns.turn_tokens)
        yield from _amounts("tokens read in the last turn", d.turns.context_tokens)
    if d.tools is not None:
        yield "calls of tools", f"{d.tools.calls:,}"
        yield from _amounts("seconds of tools", d.tools.seconds)
        yield from _amounts("tokens from tools", d.tools.returned_tokens)


def _of_prompts(d: Description) -> Iterator[tuple[str, str]]:
    if d.correlation is not None:
        yield "correlation of prompt and response", f"{d.correlation.pearson:.2f}"
        yield "correlation of their ranks", f"{d.correlation.spearman:.2f}"
    share = d.no_prompt_share if d.prompt_share is None else percent(max(0.0, d.prompt_share))
    yield "variance of log-length that the prompt explains", share
    for part, recall in d.longest_recall.items():
        yield f"longest {part} % found by a prompt's other samples", percent(recall)


def _trend(name: str, trend: TrendFigures | None) -> Iterator[tuple[str, str]]:
    if trend is not None:
        yield f"{name}, drift a step", f"{signed_percent(trend.drift)} ({interval(trend.low, trend.high)})"
        change = trend.change
        where = f"step {change.step + 1}" if change.is_clear else "none that is clear"
        yield f"{name}, change of level", f"{where} (p = {change.p_value:.2g})"


def _amounts(name: str, distribution: Distribution | None) -> Iterator[tuple[str, str]]:
    if distribution is None:
        return
    yield f"{name}, mean", number(distribution.mean)
    for part in (50, 90, 99):
        yield f"{name}, p{part}", number(distribution.percentiles[part])
    yield f"{name}, most", number(distribution.most)
    yield f"{name}, most over p90", f"{distribution.tail:.1f}"
    yield f"{name}, variation", f"{distribution.variation:.2f}"
