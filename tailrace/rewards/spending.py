"""What a grading takes of others: requests, tokens, money. It is counted whether the grading succeeds or not.

Amounts are reported as they are spent, so those of a process that dies are known, too.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar

import msgspec

from tailrace.registers.metrics import SPENT
from tailrace.rewards.base import Grade

Amounts = Mapping[str, float]
"""Amounts by name."""

_REPORT: ContextVar[Callable[[Amounts], None]] = ContextVar("report")


def begin_grading(report: Callable[[Amounts], None]) -> None:
    """Have `report` called with all that the grading spends that begins now, in this thread or asynchronous task."""
    _REPORT.set(report)


def spend(amounts: Amounts) -> None:
    """Report amounts of the grading that is under way, if there is one."""
    if report := _REPORT.get(None):
        report(amounts)


def with_spent(grades: Sequence[Grade], spent: Amounts) -> list[Grade]:
    """The grades of one call, of which the first has what the call has spent."""
    first, *others = grades
    return [msgspec.structs.replace(first, spent=dict(spent)), *others] if spent else list(grades)


def spent_metrics(grades: Iterable[Grade]) -> dict[str, float]:
    """What the gradings took together, as metrics: `spent/<what>`."""
    spent: Counter[str] = Counter()
    for grade in grades:
        spent.update(grade.spent)
    return {f"{SPENT.prefix}{what}": amount for what, amount in spent.items()}
