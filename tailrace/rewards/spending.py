"""What a grading takes of others: requests, tokens, money. It is counted whether the grading succeeds or not."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar

import msgspec

from tailrace.registers.metrics import SPENT
from tailrace.rewards.base import Grade

_SPENT: ContextVar[Counter[str]] = ContextVar("spent")


def begin_grading() -> Counter[str]:
    """Return a counter of what the grading spends that begins now, in this thread or asynchronous task."""
    spent: Counter[str] = Counter()
    _SPENT.set(spent)
    return spent


def spend(amounts: Mapping[str, float]) -> None:
    """Count amounts by name for the grading that is under way."""
    _SPENT.get(Counter()).update(amounts)


def with_spent(grades: Sequence[Grade], spent: Mapping[str, float]) -> list[Grade]:
    """The grades of one call, of which the first has what the call has spent."""
    first, *others = grades
    return [msgspec.structs.replace(first, spent=dict(spent)), *others] if spent else list(grades)


def spent_metrics(grades: Iterable[Grade]) -> dict[str, float]:
    """What the gradings took together, as metrics: `spent/<what>`."""
    spent: Counter[str] = Counter()
    for grade in grades:
        spent.update(grade.spent)
    return {f"{SPENT.prefix}{what}": amount for what, amount in spent.items()}
