"""The gate that holds a response back until the engine has weights that are new enough for it."""

from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Protocol

from tailrace.types import WeightVersion


class WeightsGate(Protocol):
    """A gate between requests and their engine."""

    def generating(self, needed: WeightVersion) -> AbstractAsyncContextManager[None]:
        """Enter once the engine has weights of version `needed` or newer; leave when the responses are finished.

        Raises:
            WeightsError: they have not come within the limit.
        """


class OpenGate:
    """A gate that never waits, for an engine that gets its weights before the prompts that need them are admitted."""

    def generating(self, needed: WeightVersion) -> AbstractAsyncContextManager[None]:
        """Enter at once."""
        return nullcontext()
