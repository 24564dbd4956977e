"""Records of samples for tests."""

from typing import Any

from tailrace.report.samples import SampleRecord


def make_sample(step: int = 1, group: int = 0, sample: int = 0, **changes: Any) -> SampleRecord:
    """Make a record, with `changes` to its fields."""
    values: dict[str, Any] = {
        "kind": "training",
        "prompt": f"n{group}",
        "response": f"response {step}.{group}.{sample}",
        "answer": str(group),
        "reward": 0.0,
        "advantage": 0.0,
        "prompt_tokens": 2,
        "tokens": 3,
        "finish_reason": "stop",
        "weight_versions": (0, 0),
    }
    return SampleRecord(step=step, group=group, sample=sample, **values | changes)
