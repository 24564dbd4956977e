"""The reference task: log-probabilities of the frozen initial weights, for the KL penalty."""

from collections.abc import Awaitable, Callable

from tailrace.events import Event, EventLog
from tailrace.tasks.base import Outputs, Task
from tailrace.transfer.queue.base import Claim, TransferQueue
from tailrace.types import FloatArray

LogProbs = Callable[[Claim], Awaitable[list[FloatArray]]]
"""[R] log-probabilities of the response tokens of each row."""


class ReferenceTask(Task):
    """Writes `ref_log_probs`."""

    name = "reference"
    actor = "trainer"

    def __init__(self, queue: TransferQueue, log: EventLog, log_probs: LogProbs, *, samples_per_step: int) -> None:
        super().__init__(queue, log, samples_per_step=samples_per_step)
        self._log_probs = log_probs

    async def compute(self, claim: Claim, span: Event) -> Outputs:
        """One forward pass over the claim."""
        span.version = 0
        values = await self._log_probs(claim)
        return {row.id: {"ref_log_probs": cell} for row, cell in zip(claim.rows, values, strict=True)}
