"""Draws `docs/images/adaptive_tp.svg`, one batch as it drains, from what `make bench-adaptive-tp` leaves in `build`."""

import json
from collections.abc import Sequence
from pathlib import Path

from svg import begun

BUILD = Path(__file__).parent.parent / "build" / "bench-adaptive-tp"
PICTURE = Path(__file__).parent.parent / "docs" / "images" / "adaptive_tp.svg"

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 760, 360, 60, 50, 30
COLOURS = {"dp2": "#84909c", "tp2": "#4285c9", "adaptive": "#d97f26"}
NAMES = {"dp2": "DP 2", "tp2": "TP 2", "adaptive": "adaptive"}

Drain = Sequence[tuple[float, int, int]]
"""Points of a drain: seconds, sequences unfinished, TP."""


def main() -> None:
    """Write the picture."""
    seen: dict[str, Drain] = json.loads((BUILD / "drain.json").read_text())
    drains = {key: seen[key] for key in COLOURS}
    longest = max(drain[-1][0] for drain in drains.values())
    most = max(unfinished for drain in drains.values() for _, unfinished, _ in drain)

    def place(seconds: float, unfinished: float) -> tuple[float, float]:
        x = LEFT + seconds / longest * (WIDTH - LEFT - 100)
        return round(x, 1), round(TOP + (1 - unfinished / most) * (HEIGHT - TOP - BOTTOM), 1)

    parts = begun(WIDTH, HEIGHT)
    for tick in range(0, most + 1, 16):
        x, y = place(0, tick)
        parts.append(f'<line x1="{x}" x2="{WIDTH - 100}" y1="{y}" y2="{y}" stroke="#e3e7eb"/>')
        parts.append(f'<text x="{x - 8}" y="{y + 4}" text-anchor="end">{tick}</text>')
    for tick in range(0, int(longest) + 1, 2):
        x, y = place(tick, 0)
        parts.append(f'<text x="{x}" y="{y + 20}" text-anchor="middle">{tick}</text>')
    parts.append(f'<text x="{LEFT}" y="{TOP - 12}">unfinished responses</text>')
    parts.append(f'<text x="{WIDTH - 100}" y="{HEIGHT - 10}" text-anchor="end">seconds</text>')
    for row, (key, drain) in enumerate(drains.items()):
        points = " ".join("{},{}".format(*place(seconds, unfinished)) for seconds, unfinished, _ in drain)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{COLOURS[key]}" stroke-width="2"/>')
        label = f"{NAMES[key]}: {drain[-1][0]:.1f} s"
        y = TOP + 20 + 20 * row
        parts.append(f'<text x="{WIDTH - 240}" y="{y}" fill="{COLOURS[key]}" font-weight="bold">{label}</text>')
    for before, after in zip(drains["adaptive"], drains["adaptive"][1:], strict=False):
        if before[2] != after[2] and after[1]:
            x, y = place(before[0], before[1])
            parts.append(f'<circle cx="{x}" cy="{y}" r="5" fill="{COLOURS["adaptive"]}"/>')
            parts.append(f'<text x="{x + 10}" y="{y - 6}">TP {before[2]} → {after[2]}</text>')
    PICTURE.write_text("\n".join([*parts, "</svg>"]) + "\n")


if __name__ == "__main__":
    main()
