"""Figures and durations written for people; shared by the display and the page."""

import math
from collections.abc import Mapping
from typing import Any

from tailrace.registers.metrics import Metric


def write(shown: Metric, value: float) -> str:
    """Write a value of a metric, without its unit."""
    return percent(value) if shown.is_fraction else number(value)


def write_change(shown: Metric, change: float) -> str:
    """Write the change of a metric: +2.5 points, -0.31."""
    return f"{100 * change:+.1f} points" if shown.is_fraction else f"{change:+.3g}"


def number(value: float) -> str:
    """Write a number with three significant digits: 1,234 · 12.3 · 0.00123 · 1.2e-06."""
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if value == int(value) and size < 1e15:
        return f"{int(value):,}"
    if size >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def percent(fraction: float) -> str:
    """Write a fraction in percent: 0.125 as 12.5 %."""
    return f"{100 * fraction:.1f} %"


def signed_percent(fraction: float) -> str:
    """Write a change in percent: 0.0125 as +1.25 %."""
    return f"{100 * fraction:+.3g} %"


def interval(low: float, high: float) -> str:
    """Write an interval of changes in percent: -0.5 to +1.25 %."""
    return f"{100 * low:+.3g} to {signed_percent(high)}"


def setting(config: Any, key: str) -> str:
    """Return the value of a dotted key of a recorded configuration as text; empty where it has none."""
    value = value_at(config, key)
    return "" if value is None else str(value)


def value_at(config: Any, key: str) -> Any:
    """Return the value of a dotted key of a recorded configuration; None where it has none."""
    value = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def duration(seconds: float) -> str:
    """Write a duration: 3725.4 as 1 h 02 min, 65 as 1 min 05 s, 1.25 as 1.2 s."""
    if round(seconds, 1) < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min"
