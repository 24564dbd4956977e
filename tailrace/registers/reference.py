"""Write docs/metrics.md from the registers: `python -m tailrace.registers.reference > docs/metrics.md`."""

from collections.abc import Iterable, Iterator

from tailrace.registers.events import EventKind
from tailrace.registers.metrics import METRICS, Group, Metric, metric
from tailrace.registers.prometheus import RUN_SERIES, Series
from tailrace.registers.queue import QUEUE_COUNTS, TASK_COUNTS

INTRODUCTION = """\
# Metrics

Every figure that a run tells, by the event that has it ([events.py](../tailrace/events.py)). `events.jsonl` has them
under these names. TensorBoard and Weights & Biases show those of a `step` as `train/NAME`, or as the name itself where
it has a `/`. They show those of an `evaluation` as `eval/NAME`. Both are over the steps done. The tables also have the
title of a metric in the display and the report, and whether higher or lower is better. A figure that is not finite is
left out. This page is written from [tailrace/registers](../tailrace/registers) by `make docs`.
"""

PROMETHEUS = """\
## Prometheus

With `observe.metrics_port=9200` the run answers Prometheus at `http://127.0.0.1:9200/metrics`, from its machine alone,
as long as it lasts. All names begin with `tailrace_`. A resumed run has its sums from 0 again.
"""

PROMETHEUS_NOTES = """\
Counters and histograms also have a series that ends with `_created`: the unix time at which it began.

A run of one process has no workers: `worker` names its engine, its graders, its trainer, and `driver` for its memory.
The queue that `tailrace queue serve` serves has metrics of its own:
[transfer_queue.md](transfer_queue.md#metrics).
"""

_GROUPS: dict[Group, str] = {
    "From its samples": """\
Computed in [step_metrics.py](../tailrace/run/step_metrics.py) from the rows that the step trained on, by the run and
for a loop of your own.
""",
    "Of its update": """\
Computed in [losses.py](../tailrace/algorithms/losses.py) and by the trainer. Means are over the tokens that are trained
on, then over the step's optimizer steps that were applied.
""",
    "Speed": "",
}
_NOTES = {
    EventKind.EVALUATION: """\
The names without a prefix are of greedy answers, where there are some; then `sampled/NAME` is of sampled ones. With
several sets of prompts, `SET/NAME` is of one of them, and the others of all together.
""",
}


def reference() -> str:
    """Return the page as Markdown."""
    return "\n".join([INTRODUCTION, *_events(), *_metrics(), *_prometheus()])


def _events() -> Iterator[str]:
    yield "## Events\n"
    yield "A line of `events.jsonl` has the kind of its event as `task`.\n"
    yield "| event | meaning |"
    yield "|---|---|"
    for kind in EventKind:
        yield f"| `{kind}` | {kind.about.meaning} |"
    yield ""


def _metrics() -> Iterator[str]:
    for kind in EventKind:
        entries = [entry for entry in METRICS if kind in entry.of]
        if not entries:
            continue
        yield f"## `{kind}`\n"
        yield f"{kind.about.meaning}\n"
        if kind in _NOTES:
            yield _NOTES[kind]
        if kind is not EventKind.STEP:
            yield from _table(kind, entries)
            continue
        for group, note in _GROUPS.items():
            yield f"### {group}\n"
            if note:
                yield note
            yield from _table(kind, [entry for entry in entries if entry.group == group])


def _table(kind: EventKind, entries: Iterable[Metric]) -> Iterator[str]:
    yield "| name | shown as | unit | better | meaning |"
    yield "|---|---|---|---|---|"
    for entry in entries:
        shown_as = "" if entry.is_family or entry is not metric(entry.name) else entry.words
        unit = "fraction" if entry.is_fraction else entry.unit
        meaning = entry.meaning if kind is entry.of[0] else f"as in `{entry.of[0]}`"
        yield f"| {' | '.join((f'`{entry.name}`', shown_as, unit, entry.better or '', meaning))} |"
    yield ""


def _prometheus() -> Iterator[str]:
    yield PROMETHEUS
    yield "| metric | labels | meaning |"
    yield "|---|---|---|"
    counts = dict.fromkeys(count.series for count in (*TASK_COUNTS, *QUEUE_COUNTS) if count.observed)
    for series in (*RUN_SERIES, *counts):
        yield f"| `{_short_name(series)}` | {_labels(series)} | {f'{series.help} {series.note}'.strip()} |"
    yield ""
    yield PROMETHEUS_NOTES


def _short_name(series: Series) -> str:
    return series.scraped_name.removeprefix("tailrace_")


def _labels(series: Series) -> str:
    return ", ".join(f"`{label}`" for label in series.labels)


if __name__ == "__main__":
    print(reference(), end="")
