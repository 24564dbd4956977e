"""Draws `docs/images/modes.svg`: some steps of each mode, from what `make bench-pipeline` leaves in `build`.

The steps are those of the last round; the benchmark's figures are medians of all rounds. Each pool has a row with its
work. Another row shows weights, from the publication of a version until it is in the engine. In the mode that shares
both cores, the rows are busy in turns.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from bench_pipeline import BUILD, MODES, WARM_UP
from pipeline_figures import Turn
from svg import begun

from tailrace.events import Event
from tailrace.registers.events import EventKind

PICTURE = Path(__file__).parent.parent / "docs" / "images" / "modes.svg"

WIDTH, LEFT, RIGHT, TOP = 880, 90, 16, 10
ROW, GAP, HEADING = 16, 5, 22
BLOCK = HEADING + 3 * (ROW + GAP) + 14
"""Height of a mode."""
COLOURS = ("#4285c9", "#d97f26", "#22997a", "#9069c6", "#c978a6")
"""Colours of training steps, in turn."""
WEIGHTS = "#84909c"
ROWS = ("rollout", "trainer", "weights")


class Bar(NamedTuple):
    """Work on one row."""

    row: str
    start: float
    end: float
    step: int | None


def bars(events: Sequence[Event]) -> Iterator[Bar]:
    """Yield the bars that show a run's events."""
    published: dict[int, float] = {}
    for event in sorted(events, key=lambda event: event.start):
        if event.task == EventKind.ROLLOUT:
            yield Bar("rollout", event.start, event.end, event.step)
        elif event.task in (EventKind.ACTOR, EventKind.OPTIMIZER):
            yield Bar("trainer", event.start, event.end, event.step)
        elif event.task == EventKind.WEIGHTS_PUBLISH and event.version is not None:
            published[event.version] = event.start
        elif event.task == EventKind.UPDATE_WEIGHTS:
            yield Bar("weights", published.get(event.version or 0, event.start), event.end, None)


def drawing(name: str, turn: Turn, seconds: float, top: int) -> Iterator[str]:
    """Yield the drawing of one mode; `seconds` are as wide as the picture."""
    start = turn.window.start

    def place(at: float) -> float:
        return round(LEFT + min(max(at - start, 0.0), seconds) / seconds * (WIDTH - LEFT - RIGHT), 1)

    yield f'<text x="{LEFT}" y="{top + 15}" font-weight="bold">{name}</text>'
    for number, row in enumerate(ROWS):
        y = top + HEADING + number * (ROW + GAP)
        yield f'<text x="{LEFT - 8}" y="{y + 12}" text-anchor="end">{row}</text>'
        yield f'<rect x="{LEFT}" y="{y}" width="{WIDTH - LEFT - RIGHT}" height="{ROW}" fill="#f1f3f5"/>'
    for bar in bars(turn.events):
        left, right = place(bar.start), place(bar.end)
        if right > left:
            y = top + HEADING + ROWS.index(bar.row) * (ROW + GAP)
            colour = WEIGHTS if bar.step is None else COLOURS[bar.step % len(COLOURS)]
            opacity = 0.45 if bar.row == "rollout" else 1
            yield (
                f'<rect x="{left}" y="{y}" width="{round(max(right - left, 1.0), 1)}" height="{ROW}" fill="{colour}" '
                f'fill-opacity="{opacity}"/>'
            )
    for step in turn.steps:
        if start < step.end <= start + seconds:
            x, y = place(step.end), top + HEADING
            yield f'<line x1="{x}" x2="{x}" y1="{y - 3}" y2="{y + 3 * (ROW + GAP)}" stroke="#30363d"/>'


def main() -> None:
    """Write the picture."""
    turns = {mode: Turn(BUILD / mode, WARM_UP) for mode in MODES}
    seconds = min(turn.window.seconds for turn in turns.values())
    height = TOP + BLOCK * len(turns) + 24
    parts = begun(WIDTH, height)
    for number, (mode, turn) in enumerate(turns.items()):
        parts += drawing(MODES[mode].title, turn, seconds, TOP + number * BLOCK)
    parts.append(
        f'<text x="{WIDTH - RIGHT}" y="{height - 8}" text-anchor="end">{seconds:.0f} seconds of the last round; a '
        "colour for each training step, a line where one ends</text>"
    )
    PICTURE.write_text("\n".join([*parts, "</svg>"]) + "\n")


if __name__ == "__main__":
    main()
