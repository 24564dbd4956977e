"""A picture of time against cost, as SVG."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT = 640, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 80, 30, 40, 56


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
    """Return the picture of some plans: seconds to the right, cost upwards; a line joins those of the front."""
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
        f'<text x="{_LEFT}" y="22" font-size="14">{escape(title)}</text>',
        f'<path d="M{_LEFT} {_TOP}V{_HEIGHT - _BOTTOM}H{_WIDTH - _RIGHT}" fill="none" stroke="#aab2ba"/>',
        f'<text x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 12}" text-anchor="end">seconds a step</text>',
        f'<text x="{_LEFT}" y="{_TOP - 4}" text-anchor="end">USD of 1,000 steps</text>',
        *_ticks(right, top),
    ]
    front = sorted((point for point in points if point.on_front), key=lambda point: point.seconds)
    joined = " ".join("{:.1f},{:.1f}".format(*place(point)) for point in front)
    lines.append(f'<polyline points="{joined}" fill="none" stroke="#4269d0" stroke-width="1.5"/>')
    for point in points:
        across, down = place(point)
        colour = "#d1495b" if point.is_best else "#4269d0" if point.on_front else "#aab2ba"
        label = escape(point.label)
        lines.append(f'<circle cx="{across:.1f}" cy="{down:.1f}" r="4" fill="{colour}"><title>{label}</title></circle>')
        if point.on_front:
            lines.append(f'<text x="{across + 7:.1f}" y="{down - 6:.1f}">{label}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def _ticks(right: float, top: float) -> list[str]:
    lines = []
    for part in range(5):
        across = _LEFT + (_WIDTH - _LEFT - _RIGHT) * part / 4
        down = _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * part / 4
        lines.append(
            f'<text x="{across:.0f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{right * part / 4:.3g}</text>'
        )
        lines.append(f'<text x="{_LEFT - 8}" y="{down + 4:.0f}" text-anchor="end">{top * part / 4:,.0f}</text>')
    return lines
