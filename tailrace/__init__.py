"""Tailrace: reinforcement-learning post-training of language models."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tailrace.api import Trainer as Trainer

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """`Trainer` is imported when it is asked for."""
    if name == "Trainer":
        from tailrace.api import Trainer

        return Trainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
