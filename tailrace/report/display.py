"""The live display of a run: a sink that draws in a terminal, or writes plain lines where there is none.

    worker threads ──emit──▶ Display ──▶ Progress (what has happened so far) ◀── the terminal's refresh thread

Neither waits for the other longer than one redraw. A lock keeps the drawing from seeing half an event.
"""

import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import cycle, pairwise
from types import TracebackType
from typing import Self

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tailrace.events import Event
from tailrace.registers.events import EventKind, title
from tailrace.registers.metrics import Shown, metric, shown_in
from tailrace.report.progress import Progress
from tailrace.report.run_data import first_and_last, shown_step
from tailrace.report.text import duration, number, write, write_change
from tailrace.report.workers import STATE_TITLES, death_text, kind_of, worker_of, worker_order

_COLOURS = ("blue", "yellow", "magenta", "green", "cyan", "red", "white")
_FEW = 4
"""Maximum number of workers of one kind that have a line each."""
_WIDTH, _BAR_WIDTH = 80, 76
_BLOCKS = "▁▂▃▄▅▆▇█"


class Display:
    """A display of a run while it goes on. Use it as a context manager, and as a sink within."""

    def __init__(self, console: Console | None = None) -> None:
        """`console`: where to draw; standard output by default."""
        self._console = console or Console(highlight=False)
        self._progress = Progress()
        self._lock = threading.Lock()
        self._live: Live | None = None
        self._failures: set[str] = set()

    def __enter__(self) -> Self:
        if self._console.is_interactive:
            self._live = Live(console=self._console, get_renderable=self._draw, refresh_per_second=2)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def __call__(self, event: Event) -> None:
        """Take one event; ignore an event that the display does not show."""
        with self._lock:
            self._progress.add(event, at=time.monotonic())
            for line in self._lines(event):
                self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _lines(self, event: Event) -> Iterator[str]:
        """Yield the lines that are written above a live display, or into a log file."""
        for error in self._new_failures(event):
            yield f"grading failed · {error}"
        if event.about.is_urgent or not self._console.is_interactive:
            yield from plain_lines(event, self._progress)

    def _new_failures(self, event: Event) -> Iterator[str]:
        """Yield the first error of each kind of failed grading, with its traceback. The figures count all of them."""
        tracebacks = event.info.get("tracebacks", {})
        for error in event.info.get("errors", ()) if event.task in (EventKind.REWARD, EventKind.EVALUATION) else ():
            kind = str(error).partition(":")[0].partition(" (")[0]
            if kind not in self._failures:
                self._failures.add(kind)
                yield "\n".join([str(error), *str(tracebacks.get(kind, "")).splitlines()])

    def _draw(self) -> RenderableType:
        with self._lock:
            return draw(self._progress, now=time.monotonic())


def plain_lines(event: Event, progress: Progress) -> Iterator[str]:
    """Yield the log lines of an event: a start, a step, an evaluation, a worker, or the entry that its kind tells."""
    match event.task:
        case EventKind.RUN:
            yield progress.headline
        case EventKind.STEP if event.step is not None:
            yield _step_line(event, progress)
        case EventKind.EVALUATION if event.step is not None:
            figures = [f"{name} {write(metric(name), value)}" for name, value in event.metrics.items()]
            yield " · ".join([f"evaluation after {event.step} steps", *figures, duration(event.end - event.start)])
        case EventKind.WORKER_DIED if kind_of(worker_of(event)) != "trainer":  # the run reports the trainer's death
            yield death_text(event)
        case EventKind.WORKER_STARTED if event.info.get("pid") and worker_of(event) in progress.dead:
            yield f"{worker_of(event)} started again (process {event.info['pid']})"
        case task if event.about.tells in event.info:
            yield f"{title(task)} · {event.info[event.about.tells]}"


def _step_line(event: Event, progress: Progress) -> str:
    said = [name for name in shown_in(Shown.LINE) if _says_something(name, (event.metrics.get(name),))]
    figures = [f"{name} {write(metric(name), event.metrics[name])}" for name in said]
    warnings = [f"{name} {event.metrics[name]:.0f}" for name in shown_in(Shown.WARNING) if event.metrics.get(name)]
    left = f"{duration(progress.remaining)} left" if progress.remaining else "done"
    took = duration(event.end - event.start)
    return " · ".join([f"step {shown_step(event)}/{progress.total_steps}", *figures, *warnings, took, left])


def draw(progress: Progress, *, now: float) -> RenderableType:
    """Return the display at the monotonic time `now`."""
    parts: list[RenderableType] = [_bar(progress, now)]
    parts.extend(_held_out(name, values) for name, values in progress.held_out.items())
    if progress.done:
        parts.extend([Text(), _metrics(progress), Text(), _time_split(progress.task_seconds)])
    parts.extend(_warnings(progress))
    if progress.activities:
        parts.extend([Text(), _workers(progress)])
    if progress.queue:
        parts.append(_queue(progress.queue))
    parts.extend(_dispatch(progress.dispatch))
    if progress.scaled is not None:
        parts.append(_engines(progress.scaled))
    if not progress.activities:  # workers do everything at once
        parts.append(Text(progress.phase, style="dim"))
    return Panel(Group(*parts), title=Text(progress.headline), title_align="left", border_style="dim", width=_WIDTH)


def _bar(progress: Progress, now: float) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    times = f"{duration(progress.elapsed(now))} elapsed"
    if progress.remaining:
        times += f", about {duration(progress.remaining)} left"
    bar = ProgressBar(total=max(1, progress.total_steps), completed=progress.done, width=16)
    table.add_row(Text(f"step {progress.done}/{progress.total_steps}", style="bold"), bar, Text(times))
    return table


def _held_out(name: str, values: Sequence[float]) -> Text:
    shown = metric(name)
    text = Text(f"held-out {shown.words.lower():<9} {write(shown, values[0])}")
    if len(values) > 1:
        change = values[-1] - values[0]
        text.append(f" → {write(shown, values[-1])}", style="bold")
        text.append(f"  ({write_change(shown, change)})", style="green" if shown.is_better(change) else "")
    return text


def _metrics(progress: Progress) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column()
    for heading in ("now", "at first", "lately"):
        table.add_column(heading, justify="right", min_width=9)
    table.add_column("trend", style="cyan")
    for name in shown_in(Shown.TABLE):
        values = progress.metrics.get(name, [])
        if _says_something(name, values):
            shown = metric(name)
            first, last = (write(shown, value) for value in first_and_last(values))
            table.add_row(
                shown.full_title, Text(write(shown, values[-1]), style="bold"), first, last, sparkline(values)
            )
    return table


def _says_something(name: str, values: Sequence[float | None]) -> bool:
    """Return whether there are figures, and not zeros alone where those go without saying."""
    return any(values) if metric(name).zero_says_nothing else any(value is not None for value in values)


def _workers(progress: Progress) -> Table:
    """Return the recent activity of each worker; where a kind has many workers, their mean."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("workers, lately")
    for state in STATE_TITLES:
        table.add_column(state, justify="right", min_width=7)
    for name, said in lately(progress.activities).items():
        total = sum(said.values())
        table.add_row(name, *(f"{100 * said[state] / total:.0f} %" if total else "–" for state in STATE_TITLES))
    return table


def lately(activities: Mapping[str, Iterable[Mapping[str, float]]]) -> dict[str, dict[str, float]]:
    """Return the seconds by state of each worker, in the order of their work. Kinds with more than a few workers are
    summed up."""
    of_kind = Counter(map(kind_of, activities))
    shown: dict[str, dict[str, float]] = {}
    for worker in sorted(activities, key=worker_order):
        kind = kind_of(worker)
        name = f"{kind} × {of_kind[kind]}" if of_kind[kind] > _FEW else worker
        seconds = shown.setdefault(name, dict.fromkeys(STATE_TITLES, 0.0))
        for said in activities[worker]:
            for state in STATE_TITLES:
                seconds[state] += said.get(state, 0.0)
    return shown


def _queue(metrics: Mapping[str, float]) -> Text:
    """Return the rows of each task that are ready and in work."""
    tasks = [name.removeprefix("ready/") for name in metrics if name.startswith("ready/")]
    words = [f"{task} {metrics[f'ready/{task}']:.0f}+{metrics.get(f'leased/{task}', 0.0):.0f}" for task in tasks]
    return Text.assemble(("rows ready+in work  ", "dim"), " · ".join(words))


def _dispatch(metrics: Mapping[str, float]) -> Iterator[Text]:
    """Yield the recall of the longest fifth, beside that by other samples, and the gains; of the newest check."""
    words = []
    if "recall_20" in metrics:
        others = metrics.get("recall_ceiling_20")
        beside = "" if others is None else f" (others {100 * others:.0f})"
        words.append(f"recall {100 * metrics['recall_20']:.0f} %{beside}")
    gains = {"order": "order_gain", "placement": "placement_gain"}
    words += [f"{title} {100 * metrics[name]:+.1f} %" for title, name in gains.items() if name in metrics]
    if "placement_gain" in metrics:
        words.append("placed" if metrics["placed"] else "pulled")
    if words:
        yield Text.assemble(("dispatch  ", "dim"), " · ".join(words))


def _engines(change: Event) -> Text:
    """Return the number of engines after its newest change, and the terms of that."""
    metrics = change.metrics
    words = [f"{len(change.info['engines'])}, by {change.info['by']} at {duration(change.end)}"]
    if "lead_s" in metrics:
        words.append(f"δ {number(metrics['lead_s'])} s, δ' {number(metrics['saved_s'])} s")
    return Text.assemble(("engines  ", "dim"), " · ".join(words))


def _time_split(seconds: dict[str, float]) -> RenderableType:
    """Return a bar divided among the tasks by the time that they took so far, and its legend."""
    total = sum(seconds.values())
    bar, legend = Text(), []
    for (task, spent), colour in zip(seconds.items(), cycle(_COLOURS), strict=False):
        if spent > 0:
            bar.append("█" * round(_BAR_WIDTH * spent / total), style=colour)
            legend.append(Text.assemble(("■ ", colour), f"{title(task)} {100 * spent / total:.0f} %"))
    return Group(bar, Columns(legend, padding=(0, 2)))


def _warnings(progress: Progress) -> Iterator[Text]:
    counts = {metric(name).words.lower(): sum(progress.metrics.get(name, ())) for name in shown_in(Shown.WARNING)}
    counts["deaths of workers"] = progress.deaths
    words = [f"{name}: {count:.0f}" for name, count in counts.items() if count > 0]
    if words:
        yield Text("! " + ", ".join(words), style="bold yellow")


def sparkline(values: list[float], width: int = 14) -> str:
    """Draw bars of `values`: the means of as many equal parts as there is room for."""
    count = min(width, len(values))
    parts = pairwise(index * len(values) // count for index in range(count + 1))
    means = [sum(values[begin:end]) / (end - begin) for begin, end in parts]
    low, high = min(means), max(means)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((mean - low) * scale)] for mean in means)
