"""The report of a run: one HTML page that needs no network."""

import json
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Template

from tailrace.errors import counted
from tailrace.events import Event
from tailrace.planning.foretold import Foretold, read_foretold
from tailrace.registers import run_files
from tailrace.registers.events import EventKind
from tailrace.registers.metrics import Shown, metric, shown_in
from tailrace.report.adaptive_tp import adaptive_tp_figures
from tailrace.report.charts import Section
from tailrace.report.dispatch import dispatch_sections
from tailrace.report.engines import engine_sections
from tailrace.report.figures import detail_sections, progress_sections
from tailrace.report.markup import as_json, charts_as_json, environment
from tailrace.report.memory import memory_chart
from tailrace.report.plan_section import plan_section
from tailrace.report.run_data import (
    RunData,
    first_and_last,
    load_run,
    median_seconds,
    metric_series,
    shown_step,
    step_of,
    write_file,
)
from tailrace.report.sample_page import page_text, sample_pages
from tailrace.report.sample_text import figures as sample_figures
from tailrace.report.sample_text import reward_words, visible
from tailrace.report.text import duration, number, setting, write, write_change
from tailrace.report.timeline import timeline
from tailrace.report.worker_figures import worker_sections
from tailrace.report.workers import restarts, worker_of
from tailrace.report.workload.run import run_sections


@dataclass(frozen=True, slots=True)
class Card:
    """A headline figure."""

    title: str
    value: str
    detail: str = ""
    warning: bool = False


def write_report(run_dir: Path, foretold: Foretold | None = None) -> Path:
    """Write `report.html` into the directory of a run, finished or not, and return its path.

    `foretold`: what the run is compared with; by default its own plan, where it has one.

    Raises:
        UserError: `run_dir` is not the directory of a run, its plan is damaged, or it cannot be written.
    """
    plan = run_dir / run_files.PLAN
    if foretold is None and plan.is_file():
        foretold = read_foretold(plan)
    return write_file(run_dir, run_files.REPORT, render(load_run(run_dir), foretold).encode())


def render(run: RunData, foretold: Foretold | None = None) -> str:
    """Render the page of `run`, with what was foretold of it."""
    progress, details = progress_sections(run), detail_sections(run)
    progress += plan_section(run, foretold)
    progress += [*worker_sections(run), *dispatch_sections(run), *engine_sections(run)]
    workload = run_sections(run)
    if adaptive_tp := adaptive_tp_figures(run):
        progress.append(Section("Engine", adaptive_tp))
    return _template().render(
        run=run,
        facts=_facts(run),
        state=_state(run),
        warnings=list(_warnings(run)),
        cards=list(_cards(run)),
        progress=progress,
        workload=workload,
        details=details,
        figures=charts_as_json([*progress, *workload, *details]),
        timeline=as_json(timeline(run)),
        memory=as_json(memory_chart(run)),
        evaluations=_evaluations(run),
        samples=sample_pages(run.texts),
        config=sorted(_flatten(run.config)),
    )


@cache
def _template() -> Template:
    """The page's template, compiled once."""
    page = environment()
    page.filters |= {
        "visible": visible,
        "page_text": page_text,
        "reward_words": reward_words,
        "sample_figures": sample_figures,
    }
    return page.get_template("report.html.j2")


def _warnings(run: RunData) -> Iterator[tuple[str, str]]:
    """Yield the steps at which each kind of warning was given, with the last of its texts."""
    kinds: dict[str, list[Event]] = {}
    for event in run.of(EventKind.WARNING):
        kinds.setdefault(str(event.info["kind"]), []).append(event)
    for events in kinds.values():
        more = f", {len(events)} times since step {shown_step(events[0])}" if len(events) > 1 else ""
        yield f"Step {shown_step(events[-1])}{more}", str(events[-1].info["text"])


def _facts(run: RunData) -> dict[str, str]:
    """Return facts about the run for the head of the page; unknown ones are left out."""
    config = run.config
    facts = {
        "Model": setting(config, "model.path"),
        "Algorithm": setting(config, "algorithm.type"),
        "Prompts": setting(config, "prompts.source.task") or setting(config, "prompts.source.type"),
        "Machine": str(run.info.get("machine") or ""),
        "Simulated": str(run.end.get("simulated") or ""),
        "Tailrace": str(run.info.get("tailrace") or ""),
        "Last event": run.last_event_at.strftime("%Y-%m-%d %H:%M %Z"),
    }
    return {name: value for name, value in facts.items() if value}


def _state(run: RunData) -> str:
    """Describe why the page does not show a whole run, and how the run ended; empty where it shows all."""
    made = step_of(run.steps[-1]) + 1 if run.steps else 0
    so_far = f"{made:,} of {run.total_steps:,} steps" if made else "No training step has finished"
    match run.end.get("how"):
        case "closed":
            state = f"A training loop of its own, which closed its engines after {counted(made, 'step')}."
        case "interrupted":
            state = f"Interrupted: {so_far}."
        case "failed":
            state = f"Failed: {so_far}. {run.end.get('error')}"
        case _ if run.is_finished:
            state = ""
        case _:
            state = f"Unfinished: {so_far}." if made else f"{so_far} yet."
    resumed = f"Resumed {run.resumes} times." if run.resumes > 1 else "Resumed once." if run.resumes else ""
    return " ".join(words for words in (state, resumed) if words)


def _cards(run: RunData) -> Iterator[Card]:
    steps = run.steps
    yield from _change_card(run, "reward", "Training reward")
    for name in shown_in(Shown.HELD_OUT):
        yield from _held_out_card(run, name)
    if steps:
        yield from _speed_cards(run)
    yield from _change_card(run, "response_tokens_mean", "Response length")
    yield from _staleness_card(run)
    yield _time_card(run)
    yield from _deaths_card(run)
    yield from _expired_card(run)
    for name in shown_in(Shown.WARNING):
        total = sum(metric_series(steps, name)[1])
        if total:
            yield Card(metric(name).words, number(total), f"in {counted(len(steps), 'step')}", warning=True)


def _change_card(run: RunData, name: str, title: str) -> Iterator[Card]:
    _, values = metric_series(run.steps, name)
    if not values:
        return
    first, last = first_and_last(values)
    if len(values) == 1:
        yield Card(title, number(first), "after one step")
        return
    count = max(1, min(5, len(values) // 2))
    ratio = f"× {last / first:.2f}, " if first > 0 and last > 0 else ""
    part = f"mean of the first and the last {count} steps" if count > 1 else "first and last step"
    yield Card(title, f"{number(first)} → {number(last)}", ratio + part)


def _held_out_card(run: RunData, name: str) -> Iterator[Card]:
    """Yield the change of `name` on the held-out prompts; nothing where no evaluation has it."""
    steps, values = metric_series(run.evaluations, name)
    shown = metric(name)
    title = f"Held-out {shown.words.lower()}"
    if len(values) == 1:
        yield Card(title, write(shown, values[0]), f"after {counted(steps[0], 'step')}")
    elif values:
        change = values[-1] - values[0]
        detail = f"{write_change(shown, change)}, before and after {counted(steps[-1] - steps[0], 'step')}"
        before = f"{100 * values[0]:.1f}" if shown.is_fraction else number(values[0])
        yield Card(title, f"{before} → {write(shown, values[-1])}", detail)


def _speed_cards(run: RunData) -> Iterator[Card]:
    steps = run.steps
    busy = sum(event.end - event.start for event in steps)
    samples, tokens = (sum(getattr(event, name) or 0 for event in steps) for name in ("samples", "tokens"))
    if busy > 0:
        detail = f"{number(tokens / busy)} tokens per second"
        yield Card("Samples per second", number(samples / busy), detail)
    yield Card("Time of a step", duration(median_seconds(steps)), f"median of {counted(len(steps), 'step')}")


def _time_card(run: RunData) -> Card:
    made = sum(event.samples or 0 for event in run.steps)
    return Card("Total time", duration(run.seconds), f"{counted(len(run.steps), 'step')}, {counted(made, 'sample')}")


def _staleness_card(run: RunData) -> Iterator[Card]:
    steps = run.steps
    _, greatest = metric_series(steps, "staleness_max")
    _, means = metric_series(steps, "staleness_mean")
    if any(greatest) and means:
        yield Card(
            "Staleness",
            f"{number(statistics.fmean(means))} mean",
            f"{counted(round(max(greatest)), 'version')} at most",
        )


def _deaths_card(run: RunData) -> Iterator[Card]:
    died = Counter(map(worker_of, run.of(EventKind.WORKER_DIED)))
    if died:
        workers = ", ".join(f"{worker} × {times}" if times > 1 else worker for worker, times in died.items())
        yield Card("Deaths of workers", number(died.total()), f"{workers}; {restarts(run)} restarted", warning=True)


def _expired_card(run: RunData) -> Iterator[Card]:
    """Yield the rows that went back, by the queue's counts at the end: it keeps these in checkpoints."""
    *_, last = ({}, *(event.metrics for event in run.of(EventKind.QUEUE)))
    rows = {name.removeprefix("expired/"): n for name, n in last.items() if name.startswith("expired/") and n}
    if rows:
        tasks = ", ".join(f"{task} {number(count)}" for task, count in rows.items())
        yield Card(
            "Rows that went back", number(sum(rows.values())), f"{tasks}; from dead or slow workers", warning=True
        )


def _evaluations(run: RunData) -> list[dict[str, str]]:
    """Return the rows of the table of evaluations, with a column for each metric that all of them share."""
    rows = []
    for event in run.evaluations:
        figures = {metric(name).full_title: write(metric(name), value) for name, value in event.metrics.items()}
        rows.append({"After steps": str(event.step), "Prompts": number(event.samples or 0), **figures})
    shared = [name for name in (rows[0] if rows else {}) if all(name in row for row in rows)]
    return [{name: row[name] for name in shared} for row in rows]


def _flatten(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted names and JSON values of a configuration."""
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", json.dumps(value, ensure_ascii=False)
