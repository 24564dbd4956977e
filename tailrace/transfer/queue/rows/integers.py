"""Integers that callers give: those that travel and are stored are of 64 bits, signed."""

import operator

from tailrace.errors import QueueError


def is_int64(number: object) -> bool:
    """Whether it is an integer of 64 bits, signed: one of Python, or of a library that has its own; no truth value."""
    if type(number) is not int:
        if isinstance(number, bool):
            return False
        try:
            number = operator.index(number)  # type: ignore[arg-type]
        except TypeError:
            return False
    return -(2**63) <= number < 2**63


def check_integer(name: str, value: int) -> None:
    """Whether `value`, which is called `name`, is an integer of 64 bits, signed.

    Raises:
        QueueError: it is not.
    """
    if not is_int64(value):
        raise QueueError(f"{name}: got {value!r:.80}, expected an integer of 64 bits, signed")
