"""The charts of the checks of dispatch: how well lengths were expected, and what placing prompts by them gained."""

import math
import textwrap
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from tailrace.errors import counted
from tailrace.events import Event
from tailrace.registers.events import BLUE, GREEN, GREY, ORANGE, RED, EventKind
from tailrace.report.charts import Figure, Section, axis, drawn
from tailrace.report.figures import step_axis
from tailrace.report.run_data import RunData, metric_series, shown_step
from tailrace.report.text import duration, number, setting

_LONGEST = {20: "fifth", 10: "tenth", 5: "twentieth"}
"""The percentages of the longest responses whose recall is told."""
_INTERVAL = 0.8
"""The share of responses that their intervals should hold (`planning.lengths`)."""
_SHARE = {"tickformat": ".2~%", "autorangeoptions": {"include": 0}}
_MOVES = 20
"""Maximum number of moves in the table, the newest ones."""
_CHANGES = {True: ("placed from then on", GREEN, "diamond"), False: ("pulled from then on", RED, "x")}
"""What follows a change, with the colour and the symbol of its mark."""


class _Change(NamedTuple):
    """A change between placing and pulling."""

    event: Event
    after: int
    """Training steps before it."""
    gain: float
    """Of placement, at the check that led to it; 0 where there was none."""

    @property
    def places(self) -> bool:
        """Whether prompts are placed after it."""
        return bool(self.event.metrics["placed"])


def dispatch_sections(run: RunData) -> list[Section]:
    """Return the charts of the checks of dispatch, and its moves; none where there was no check, change or move."""
    checks, changes = list(run.of(EventKind.DISPATCH)), list(_changes(run))
    moves = list(run.of(EventKind.MOVE))
    if not (checks or changes or moves):
        return []
    figures = [_recall_figure(checks, changes, percent) for percent in _LONGEST]
    figures += [_expected_figure(checks, changes), _gains_figure(checks, changes, _least_gain(run))]
    notes = [*_notes(checks, changes), *_moves(moves)]
    return [Section("Dispatch by length", drawn(figures), [_move(move) for move in moves[-_MOVES:]], " ".join(notes))]


def _changes(run: RunData) -> Iterator[_Change]:
    """Yield the changes. One that no check led to comes after the steps that had ended by then."""
    gains = {check.step: check.metrics.get("placement_gain", 0.0) for check in run.of(EventKind.DISPATCH)}
    ends = [step.end for step in run.steps]
    for event in run.of(EventKind.DISPATCH_CHANGE):
        after = bisect_right(ends, event.end) if event.step is None else shown_step(event)
        yield _Change(event, after, 0.0 if event.step is None else gains.get(event.step, 0.0))


def _notes(checks: Sequence[Event], changes: Sequence[_Change]) -> Iterator[str]:
    """Yield what expects lengths and places prompts, how sure a recall is, and the newest change."""
    if checks:
        last = checks[-1]
        yield f"Policy {last.info['policy']}, lengths from {last.info['lengths']}; {counted(len(checks), 'check')}."
        if any(name.startswith("recall_ceiling_") for check in checks for name in check.metrics):
            yield "Other samples: the recall by the mean length of each group's other samples, which is no bound."
        if last.samples:
            longest = max(1, round(last.samples * 0.2))
            yield (
                f"A check of {last.samples} responses has {longest} in the longest fifth, so that recall is sure to "
                f"about ±{100 * math.sqrt(0.16 / longest):.0f} points; those of the tenth and the twentieth to less."
            )
    if changes:
        yield f"A vertical line is a change; the newest, after step {changes[-1].after}: {_text(changes[-1])}."


def _moves(moves: Sequence[Event]) -> Iterator[str]:
    """Yield how many responses went on in another engine, in which way, and what the table has of that."""
    ways = Counter(event.info["way"] for event in moves)
    if ways:
        total, sent, again = counted(ways.total(), "move"), ways["transfer"], ways["recompute"]
        yield f"{total} of running responses: {sent} by their keys and values, {again} computed again."
    if len(moves) > _MOVES:
        yield f"The table has the newest {_MOVES}."


def _move(move: Event) -> dict[str, str]:
    """Return the row of a move."""
    way = "computed again" if move.info["way"] == "recompute" else "keys and values"
    return {
        "Move of a response at": duration(move.end),
        "From": move.info["source"],
        "To": move.info["target"],
        "By": way,
    }


def _text(change: _Change) -> str:
    return str(change.event.info["text"])


def _recall_figure(checks: Sequence[Event], changes: Sequence[_Change], percent: int) -> Figure | None:
    """Draw how many of the longest responses were found, beside those by other samples, and beside chance."""
    steps, found = _series(checks, f"recall_{percent}")
    if not steps:
        return None
    data = [
        _line(steps, found, "found", BLUE, width=2.4),
        _line(*_series(checks, f"recall_ceiling_{percent}"), "other samples", ORANGE, dash="dash"),
        _level(steps, percent / 100, "chance"),
    ]
    return Figure(
        id=f"recall-{percent}",
        title=f"Recall of the longest {_LONGEST[percent]}",
        caption=f"Of the longest {percent} %, the share among as many with the longest expectations.",
        data=[trace for trace in data if trace["x"]],
        layout=_layout("Recall", _SHARE, changes),
    )


def _expected_figure(checks: Sequence[Event], changes: Sequence[_Change]) -> Figure | None:
    """Draw the rank correlation, and the share of responses within their intervals."""
    steps, inside = _series(checks, "expected_inside")
    if not steps:
        return None
    data = [
        _line(*_series(checks, "expected_tau"), "Kendall's τ", BLUE, width=2.4, is_share=False),
        _line(steps, inside, "share within the interval", ORANGE, dash="dash"),
        _level(steps, _INTERVAL, "share that should be"),
    ]
    return Figure(
        id="expected-lengths",
        title="Expected and real lengths",
        caption="Rank correlation, and the responses that are within the interval of their lengths.",
        data=[trace for trace in data if trace["x"]],
        layout=_layout("τ, share", {"autorangeoptions": {"include": [0, 1]}}, changes),
    )


def _gains_figure(checks: Sequence[Event], changes: Sequence[_Change], least: float | None) -> Figure | None:
    """Draw what the order and placement gained beside what placement has to gain; None where no step was timed."""
    order = _gain_line(checks, "order_gain", "order, over pulling as they came", BLUE, width=1.6)
    placement = _gain_line(checks, "placement_gain", "placement, over both", ORANGE, width=2.4)
    if not order["x"]:
        return None
    data = [order, placement]
    if least is not None and placement["x"]:
        data.append(_level(placement["x"], least, "least gain of placement"))
    data += [_marks(changes, places) for places in _CHANGES]
    return Figure(
        id="dispatch-gains",
        title="What order and placement gain",
        caption=(
            "Parts of the generation time, as predicted from the lengths that came. Below its least gain, placement is "
            "given up."
        ),
        data=[trace for trace in data if trace["x"]],
        layout=_layout("Gain", _SHARE, changes),
        wide=True,
    )


def _gain_line(checks: Sequence[Event], metric: str, name: str, colour: str, *, width: float) -> dict[str, Any]:
    timed = [check for check in checks if metric in check.metrics]
    line = _line(*metric_series(timed, metric), name, colour, width=width)
    hover = line["hovertemplate"].replace("<extra>", "<br>%{customdata}<extra>")
    return line | {"customdata": [_seconds(check) for check in timed], "hovertemplate": hover}


def _seconds(check: Event) -> str:
    ways = {"pulled": "pull_s", "in order": "ordered_s", "placed": "placed_s"}
    return ", ".join(f"{way} {number(check.metrics[name])} s" for way, name in ways.items() if name in check.metrics)


def _least_gain(run: RunData) -> float | None:
    """Return `rollout.dispatch.least_gain` of the run; None where it recorded no configuration."""
    recorded = setting(run.config, "rollout.dispatch.least_gain")
    return float(recorded) if recorded else None


def _marks(changes: Sequence[_Change], places: bool) -> dict[str, Any]:
    name, colour, symbol = _CHANGES[places]
    shown = [change for change in changes if change.places == places]
    return {
        "type": "scatter",
        "name": name,
        "x": [change.after for change in shown],
        "y": [change.gain for change in shown],
        "mode": "markers",
        "marker": {"color": colour, "size": 12, "symbol": symbol},
        "text": ["<br>".join(textwrap.wrap(_text(change), 80)) for change in shown],
        "hovertemplate": "step %{x}: %{text}<extra></extra>",
    }


def _series(checks: Sequence[Event], name: str) -> tuple[list[int], list[float | None]]:
    """Return a metric of all checks by step. A check without it is a gap; where none has it, there is nothing."""
    values = [check.metrics.get(name) for check in checks]
    return ([], []) if all(value is None for value in values) else ([shown_step(check) for check in checks], values)


def _line(
    steps: Sequence[int],
    values: Sequence[float | None],
    name: str,
    colour: str,
    *,
    width: float = 1.6,
    dash: str = "solid",
    is_share: bool = True,
) -> dict[str, Any]:
    """Return a line with a point at each check: there are few of them."""
    return {
        "type": "scatter",
        "name": name,
        "x": list(steps),
        "y": list(values),
        "mode": "lines+markers",
        "line": {"color": colour, "width": width, "dash": dash},
        "marker": {"color": colour, "size": 5},
        "hovertemplate": "step %{x}: %{y:" + (".1%" if is_share else ".3~f") + "}<extra>" + name + "</extra>",
    }


def _level(steps: Sequence[int], value: float, name: str) -> dict[str, Any]:
    """Return a line at the height of `value`, as wide as the checks."""
    ends = [min(steps), max(steps)]
    return _line(ends, [value] * 2, name, GREY, dash="dot") | {"mode": "lines" if ends[0] < ends[1] else "markers"}


def _layout(y: str, properties: dict[str, Any], changes: Sequence[_Change]) -> dict[str, Any]:
    """Return a layout over training steps with a vertical line at each change."""
    lines = [
        {
            "type": "line",
            "x0": change.after,
            "x1": change.after,
            "yref": "paper",
            "y0": 0,
            "y1": 1,
            "line": {"color": GREY, "width": 1, "dash": "dot"},
            "layer": "below",
        }
        for change in changes
    ]
    return {"xaxis": step_axis(), "yaxis": axis(y, **properties), "showlegend": True, "shapes": lines}
