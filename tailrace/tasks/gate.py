"""When a response may begin: not before the engine has weights that are new enough for it."""

from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Protocol

from tailrace.types import WeightVersion


class WeightsGate(Protocol):
    """Stands between claimed prompts and the engine."""

    def generating(self, needed: WeightVersion) -> AbstractAsyncContextManager[None]:
        """Enter once the engine has weights of version `needed` or newer; leave when the responses are finished.

        Raises:
            WeightsError: they have not come within the limit.
        """


class OpenGate:
    """For an engine that gets its weights before the prompts that wait for them are admitted."""

    def generating(self, needed: WeightVersion) -> AbstractAsyncContextManager[None]:
        """At once."""
        return nullcontext()
