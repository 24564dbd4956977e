"""Tailrace: reinforcement-learning post-training of language models."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tailrace.api import FitResult, Trainer

__all__ = ("FitResult", "Trainer")
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that the command line starts without it."""
    if name in __all__:
        from tailrace import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
