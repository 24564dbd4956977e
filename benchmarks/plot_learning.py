"""Draws `docs/images/learning.svg` and `learning_smollm2.svg`: the rewards of the modes over time, from what
`make bench-modes` leaves.

A panel has a fleet of engines, a line has a mode: the means over the seeds at each evaluation.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean

import msgspec
from bench_modes import CURVES, MODES, Curve
from svg import begun

IMAGES = Path(__file__).parent.parent / "docs" / "images"
PICTURES = {"tiny": IMAGES / "learning.svg", "smollm2": IMAGES / "learning_smollm2.svg"}

WIDTH, HEIGHT = 400, 240
LEFT, TOP, GAP = 40, 76, 36
IN_A_ROW, ENTRY = 4, 150
"""Entries of the legend, and the width of one."""
TITLES = {"two": "two engines", "three": "three engines, one at half speed"}
COLOURS = dict(zip(MODES, ("#5b6770", "#d97f26", "#b8505a", "#4285c9", "#22997a", "#7b5cc4", "#c9a227"), strict=True))


def means(curves: Sequence[Curve]) -> tuple[list[float], list[float]]:
    """The seconds and the rewards at each evaluation, over the seeds."""
    seconds = [fmean(at) for at in zip(*(curve.seconds for curve in curves), strict=True)]
    return seconds, [fmean(at) for at in zip(*(curve.rewards for curve in curves), strict=True)]


Lines = dict[str, tuple[list[float], list[float]]]
"""The means of a fleet, by mode."""


def panel(fleet: str, lines: Lines, left: float, low: float, high: float) -> Iterator[str]:
    """Yield the drawing of one fleet, for rewards from `low` to `high`."""
    longest = max(seconds[-1] for seconds, _ in lines.values())
    yield f'<text x="{left}" y="{TOP - 8}" font-weight="bold">{TITLES[fleet]}</text>'
    for level in (low, (low + high) / 2, high):
        y = TOP + (high - level) / (high - low) * HEIGHT
        yield f'<line x1="{left}" x2="{left + WIDTH}" y1="{y}" y2="{y}" stroke="#e3e7ea"/>'
        yield f'<text x="{left - 6}" y="{y + 4}" text-anchor="end">{level:g}</text>'
    for mode, (seconds, rewards) in lines.items():
        places = " ".join(
            f"{left + x / longest * WIDTH:.1f},{TOP + (high - y) / (high - low) * HEIGHT:.1f}"
            for x, y in zip(seconds, rewards, strict=True)
        )
        yield f'<polyline points="{places}" fill="none" stroke="{COLOURS[mode]}" stroke-width="1.6"/>'
    yield f'<text x="{left + WIDTH}" y="{TOP + HEIGHT + 15}" text-anchor="end">{longest:.0f} s</text>'


def main() -> None:
    """Draw the picture of each model whose curves are there."""
    for model, path in CURVES.items():
        if path.exists():
            PICTURES[model].write_text(picture(path))


def picture(path: Path) -> str:
    """The picture of the curves in a file."""
    fleets = msgspec.json.decode(path.read_bytes(), type=dict[str, dict[str, list[Curve]]])
    drawing = begun(LEFT + max(len(fleets) * (WIDTH + GAP), IN_A_ROW * ENTRY), TOP + HEIGHT + 30)
    for number, mode in enumerate(MODES):
        x, y = LEFT + number % IN_A_ROW * ENTRY, 14 + number // IN_A_ROW * 22
        drawing.append(f'<line x1="{x}" x2="{x + 18}" y1="{y}" y2="{y}" stroke="{COLOURS[mode]}" stroke-width="3"/>')
        drawing.append(f'<text x="{x + 24}" y="{y + 4}">{mode}</text>')
    drawn: dict[str, Lines] = {
        fleet: {mode: means(curves) for mode, curves in modes.items()} for fleet, modes in fleets.items()
    }
    rewards = [reward for lines in drawn.values() for _, line in lines.values() for reward in line]
    low, high = math.floor(10 * min(rewards)) / 10, math.ceil(10 * max(rewards)) / 10
    for number, (fleet, lines) in enumerate(drawn.items()):
        drawing += panel(fleet, lines, LEFT + number * (WIDTH + GAP), low, high)
    return "\n".join([*drawing, "</svg>", ""])


if __name__ == "__main__":
    main()
