"""Draws `docs/images/algorithms.svg`: the rewards of each algorithm's runs, from what `make bench-algorithms` leaves.

A panel has an algorithm, a line has a mode: the mean over the seeds, in a band from the least seed to the greatest.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean

from bench_algorithms import CURVES, EVERY, MODES, STALENESS
from svg import begun

PICTURE = Path(__file__).parent.parent / "docs" / "images" / "algorithms.svg"

COLUMNS, WIDTH, HEIGHT = 3, 250, 150
LEFT, TOP, GAP, HEADING = 40, 40, 30, 22
COLOURS = {"synchronous": "#4285c9", "uncorrected": "#d97f26", "corrected": "#22997a"}
LABELS = {
    "synchronous": "synchronous",
    "uncorrected": f"max_staleness {STALENESS}, without correction",
    "corrected": f"max_staleness {STALENESS}, truncated importance sampling",
}


def points(values: Sequence[float], left: float, top: float) -> list[str]:
    """The places of a curve's steps in its panel."""
    last = max(1, len(values) - 1)
    return [f"{left + x / last * WIDTH:.1f},{top + (1 - y) * HEIGHT:.1f}" for x, y in enumerate(values)]


def panel(name: str, modes: dict[str, list[list[float]]], left: float, top: float) -> Iterator[str]:
    """Yield the drawing of one algorithm."""
    yield f'<text x="{left}" y="{top - 8}" font-weight="bold">{name}</text>'
    for level in (0.0, 0.5, 1.0):
        y = top + (1 - level) * HEIGHT
        yield f'<line x1="{left}" x2="{left + WIDTH}" y1="{y}" y2="{y}" stroke="#e3e7ea"/>'
        if left == LEFT:
            yield f'<text x="{left - 6}" y="{y + 4}" text-anchor="end">{level:g}</text>'
    for mode in MODES:
        by_step = list(zip(*modes[mode], strict=True))
        band = points([max(at) for at in by_step], left, top) + points([min(at) for at in by_step], left, top)[::-1]
        yield f'<polygon points="{" ".join(band)}" fill="{COLOURS[mode]}" fill-opacity="0.15"/>'
        line = points([fmean(at) for at in by_step], left, top)
        yield f'<polyline points="{" ".join(line)}" fill="none" stroke="{COLOURS[mode]}" stroke-width="1.6"/>'
    steps = EVERY * (len(modes["synchronous"][0]) - 1)
    yield f'<text x="{left + WIDTH}" y="{top + HEIGHT + 15}" text-anchor="end">step {steps}</text>'


def main() -> None:
    """Draw the picture."""
    curves = json.loads(CURVES.read_text())
    rows = -(-len(curves) // COLUMNS)
    width = LEFT + COLUMNS * (WIDTH + GAP)
    lines = begun(width, TOP + rows * (HEADING + HEIGHT + GAP))
    for number, (mode, label) in enumerate(LABELS.items()):
        x = LEFT + (0, 130, 410)[number]
        lines.append(f'<line x1="{x}" x2="{x + 18}" y1="14" y2="14" stroke="{COLOURS[mode]}" stroke-width="3"/>')
        lines.append(f'<text x="{x + 24}" y="18">{label}</text>')
    for number, (name, modes) in enumerate(curves.items()):
        left = LEFT + number % COLUMNS * (WIDTH + GAP)
        top = TOP + number // COLUMNS * (HEADING + HEIGHT + GAP) + HEADING
        lines += panel(name, modes, left, top)
    PICTURE.write_text("\n".join([*lines, "</svg>", ""]))


if __name__ == "__main__":
    main()
