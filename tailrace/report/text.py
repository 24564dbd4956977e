"""How figures, durations and metric names are written for people; shared by the display and the page."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Metric:
    """How a metric is presented."""

    title: str
    unit: str = ""
    percent: bool = False
    """A fraction of 1 that is written in percent."""

    def write(self, value: float) -> str:
        """`value` without its unit."""
        return percent(value) if self.percent else number(value)

    @property
    def full_title(self) -> str:
        """The title with the unit."""
        return f"{self.title} ({self.unit})" if self.unit else self.title


_METRICS = {
    "reward": Metric("Reward"),
    "reward_std": Metric("Reward deviation"),
    "accuracy": Metric("Accuracy", percent=True),
    "reward_failures": Metric("Reward failures", "samples"),
    "response_tokens": Metric("Response length", "tokens"),
    "response_tokens_mean": Metric("Mean response", "tokens"),
    "response_tokens_max": Metric("Longest response", "tokens"),
    "truncated_fraction": Metric("Truncated responses", percent=True),
    "sampling_entropy": Metric("Entropy of sampling", "nats"),
    "samples_per_s": Metric("Samples per second"),
    "tokens_per_s": Metric("Tokens per second"),
    "loss": Metric("Loss"),
    "grad_norm": Metric("Gradient norm"),
    "lr": Metric("Learning rate"),
    "clip_fraction_low": Metric("Tokens clipped low", percent=True),
    "clip_fraction_high": Metric("Tokens clipped high", percent=True),
    "skipped_updates": Metric("Skipped updates", "updates"),
    "flat_groups": Metric("Groups without signal", "groups"),
    "rollout_mismatch": Metric("Rollout mismatch", "nats"),
    "on_policy": Metric("On-policy tokens", percent=True),
    "on_policy_mismatch": Metric("On-policy mismatch", "nats"),
    "correction_weight": Metric("Rollout correction"),
    "correction_truncated": Metric("Truncated corrections", percent=True),
    "approx_kl": Metric("KL from the start of the step", "nats"),
    "staleness_mean": Metric("Mean staleness", "versions"),
    "staleness_max": Metric("Max staleness", "versions"),
    "ref_kl": Metric("KL from the reference", "nats"),
}


def metric(name: str) -> Metric:
    """The presentation of metric `name`; a metric that is not known is called by its name."""
    return _METRICS.get(name) or Metric(name.replace("_", " ").capitalize())


def number(value: float) -> str:
    """Three significant digits: 1,234 · 12.3 · 0.00123 · 1.2e-06."""
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if value == int(value) and size < 1e15:
        return f"{int(value):,}"
    if size >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def percent(fraction: float) -> str:
    """0.125 as 12.5 %."""
    return f"{100 * fraction:.1f} %"


def setting(config: Any, key: str) -> str:
    """The value of a dotted key of a recorded configuration; empty where it has none."""
    value = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return "" if value is None else str(value)


def counted(count: int, noun: str) -> str:
    """1 step, 1,000 steps."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def duration(seconds: float) -> str:
    """3725.4 as 1 h 02 min, 65 as 1 min 05 s, 1.25 as 1.2 s."""
    if round(seconds, 1) < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min"
