"""A picture of time against cost, as SVG."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise, zip_longest
from typing import NamedTuple

_WIDTH, _HEIGHT = 640, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 30, 52, 56
_LETTER_W, _LABEL_H, _RADIUS = 7.0, 14.0, 4.0
"""Sizes of a label, and of a point."""
_TICKS = 5
"""Numbers on an axis, about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A plan in the picture."""

    seconds: float
    usd: float
    """Of 1,000 steps."""
    label: str
    is_best: bool = False
    on_front: bool = False


def front_svg(points: Sequence[Point], *, title: str) -> str:
    """Return the picture of some plans: seconds to the right, cost upwards.

    A line with steps is the border of what has been found: each plan is on it or above it. Plans on it have labels, as
    far as there is room.
    """
    right = 1.05 * max(point.seconds for point in points)
    top = 1.1 * max(point.usd for point in points)

    def place(point: Point) -> tuple[float, float]:
        across = (_WIDTH - _LEFT - _RIGHT) * point.seconds / right
        up = (_HEIGHT - _TOP - _BOTTOM) * point.usd / top
        return _LEFT + across, _HEIGHT - _BOTTOM - up

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        'font-size="12" fill="#55606b">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>',
        f'<text x="8" y="20" font-size="14">{escape(title)}</text>',
        f'<text x="{_WIDTH - _RIGHT}" y="{_TOP - 4}" text-anchor="end">red: the best; blue: no plan beats it in both; '
        "grey: others</text>",
        f'<path d="M{_LEFT} {_TOP}V{_HEIGHT - _BOTTOM}H{_WIDTH - _RIGHT}" fill="none" stroke="#aab2ba"/>',
        f'<text x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 12}" text-anchor="end">seconds a step</text>',
        f'<text x="8" y="{_TOP - 4}">USD of 1,000 steps</text>',
        *_ticks(right, top),
    ]
    front = sorted((point for point in points if point.on_front), key=lambda point: point.seconds)
    places = [place(point) for point in front]
    corners = [(across, down) for (_, down), (across, _) in pairwise(places)]
    stairs = [place for both in zip_longest(places, corners) for place in both if place is not None]
    joined = " ".join(f"{across:.1f},{down:.1f}" for across, down in stairs)
    lines.append(f'<polyline points="{joined}" fill="none" stroke="#4269d0" stroke-width="1.5"/>')
    dots = [_Box.around(*place(point)) for point in points]
    taken = [dot for dot, point in zip(dots, points, strict=True) if point.on_front or point.is_best]
    for point in sorted(points, key=lambda point: (point.on_front, not point.is_best)):
        across, down = place(point)
        colour = "#d1495b" if point.is_best else "#4269d0" if point.on_front else "#aab2ba"
        label = escape(point.label)
        lines.append(f'<circle cx="{across:.1f}" cy="{down:.1f}" r="{_RADIUS:g}" fill="{colour}">')
        lines.append(f"<title>{label}</title></circle>")
        if point.on_front and (box := _free(across, down, len(point.label), taken, dots)) is not None:
            taken.append(box)
            lines.append(f'<text x="{box.left:.1f}" y="{box.top + 11:.1f}">{label}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


class _Box(NamedTuple):
    left: float
    top: float
    right: float
    bottom: float

    @classmethod
    def around(cls, across: float, down: float) -> "_Box":
        """That of a point."""
        return cls(across - _RADIUS, down - _RADIUS, across + _RADIUS, down + _RADIUS)

    def meets(self, other: "_Box") -> bool:
        return (
            self.left < other.right and other.left < self.right and self.top < other.bottom and other.top < self.bottom
        )


def _free(across: float, down: float, letters: int, taken: Sequence[_Box], dots: Sequence[_Box]) -> _Box | None:
    """The place of a label beside a point. It meets nothing `taken`, and the fewest `dots`; None without room."""
    width, gap = _LETTER_W * letters, 2 * _RADIUS
    corners = [
        (across - width / 2, down + gap),
        (across + gap, down - _LABEL_H / 2),
        (across - width / 2, down - gap - _LABEL_H),
        (across - gap - width, down - _LABEL_H / 2),
    ]
    boxes = [_Box(left, top, left + width, top + _LABEL_H) for left, top in corners]
    free = [box for box in boxes if box.right < _WIDTH and box.left > _LEFT and not any(map(box.meets, taken))]
    return min(free, key=lambda box: sum(map(box.meets, dots)), default=None)


def _ticks(right: float, top: float) -> Iterator[str]:
    """Yield round numbers on both axes, from 0 on."""
    for number in _round_numbers(right):
        across = _LEFT + (_WIDTH - _LEFT - _RIGHT) * number / right
        yield f'<text x="{across:.0f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{number:,.10g}</text>'
    for number in _round_numbers(top):
        down = _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * number / top
        yield f'<text x="{_LEFT - 8}" y="{down + 4:.0f}" text-anchor="end">{number:,.10g}</text>'


def _round_numbers(most: float) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten."""
    power = 10 ** math.floor(math.log10(most / _TICKS))
    step = next(power * times for times in (1, 2, 5, 10) if power * times * _TICKS >= most)
    return [step * number for number in range(int(most / step) + 1)]
