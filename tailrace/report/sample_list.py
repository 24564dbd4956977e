"""`tailrace samples`: the texts of a step or an evaluation in a terminal, or as JSON lines."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.text import Text

from tailrace.errors import UserError, counted
from tailrace.report.sample_text import Group, figures, grouped, load_samples, place_title, reward_words, visible
from tailrace.report.samples import SampleRecord

_HEAD, _TAIL = 18, 6
"""Lines that are shown of the beginning and the end of a long text."""


def print_samples(
    run_dir: Path, *, step: int | None, evaluation: bool, worst: bool, limit: int, full: bool, json: bool
) -> None:
    """Show the samples of a training step, or of an evaluation.

    `step`: by default the newest that has samples. `limit`: samples shown of each group, 0 for all. `full`: shorten no
    text. `json`: print every record instead, one per line.

    Raises:
        UserError: the run has no samples, or none of that step.
    """
    records = _of_place(load_samples(run_dir), "evaluation" if evaluation else "training", step, run_dir)
    groups = grouped(records, worst_first=worst)
    console = Console(highlight=False)
    if json:
        lines = [msgspec.json.encode(sample).decode() for group in groups for sample in group.samples]
        console.file.write("".join(line + "\n" for line in lines))
        return
    title = place_title(records[0].kind, records[0].step)
    heading = f"{visible(run_dir.resolve().name)} · {title} · {counted(len(groups), 'prompt')}"
    console.print(Text(heading, style="bold"), soft_wrap=True)
    for group in groups:
        _print_group(console, group, limit=limit, full=full, worst=worst)


def _of_place(records: Sequence[SampleRecord], kind: str, step: int | None, run_dir: Path) -> list[SampleRecord]:
    steps = sorted({record.step for record in records if record.kind == kind})
    if not steps:
        raise UserError(f"{run_dir} has no samples of {'an evaluation' if kind == 'evaluation' else 'training'} yet")
    chosen = steps[-1] if step is None else step
    if chosen not in steps:
        nearest = sorted(steps, key=lambda known: abs(known - chosen))[:3]
        near = ", ".join(str(known) for known in sorted(nearest))
        raise UserError(f"{run_dir} has no samples of {place_title(kind, chosen)}; near it are those of {near}")
    return [record for record in records if record.kind == kind and record.step == chosen]


def _print_group(console: Console, group: Group, *, limit: int, full: bool, worst: bool) -> None:
    shown = _some(group.samples, limit, worst=worst)
    console.print()
    console.print(Text.assemble((f"prompt {group.number}", "bold cyan"), f" · {group.words}"), soft_wrap=True)
    _quote(console, group.prompt, full=full)
    if group.answer is not None:
        console.print(Text("  answer"))
        _quote(console, group.answer, full=full)
    for sample in shown:
        words = Text.assemble("  ", (reward_words(sample), "bold"), " · ", " · ".join(figures(sample)))
        console.print(words, soft_wrap=True)
        if sample.failure:
            console.print(Text(f"  {visible(sample.failure)}", style="yellow"), soft_wrap=True)
        _quote(console, sample.response, full=full)
    if len(shown) < len(group.samples):
        console.print(Text(f"  {len(group.samples) - len(shown)} more: --limit 0 shows all", style="dim"))


def _some(samples: Sequence[SampleRecord], limit: int, *, worst: bool) -> list[SampleRecord]:
    """Return the first `limit` samples or, where the best come first, the first and the last, `limit` together."""
    if not limit or len(samples) <= limit:
        return list(samples)
    if worst:
        return list(samples[:limit])
    last = limit // 2
    return [*samples[: limit - last], *samples[len(samples) - last :]]


def _quote(console: Console, text: str, *, full: bool) -> None:
    for line in _lines(visible(text).rstrip("\n"), full=full):
        # a log file gets each line whole, so that it can be searched
        parts = Text(line).wrap(console, max(20, console.width - 4)) if console.is_terminal else [Text(line)]
        for part in parts:
            console.print(Text.assemble(("  │ ", "dim"), part), soft_wrap=True)


def _lines(text: str, *, full: bool) -> Iterator[str]:
    lines = text.split("\n")
    if full or len(lines) <= _HEAD + _TAIL + 1:
        yield from lines
        return
    yield from lines[:_HEAD]
    yield f"[… {len(lines) - _HEAD - _TAIL} lines left out; --full shows them …]"
    yield from lines[-_TAIL:]
