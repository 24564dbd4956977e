"""The reference task: log-probabilities of the frozen initial weights, for the KL penalty."""

from collections.abc import Awaitable, Callable, Sequence

from tailrace.activity import Activity
from tailrace.events import Event, EventLog
from tailrace.tasks.actor import train_sample
from tailrace.tasks.base import Outputs, Task
from tailrace.trainer.base import TrainSample
from tailrace.transfer.queue.base import Claim, TransferQueue
from tailrace.types import FloatArray

Score = Callable[[Sequence[TrainSample]], Awaitable[list[FloatArray]]]
"""[R] log-probabilities of the response tokens of each sample."""


class ReferenceTask(Task):
    """Writes `ref_log_probs`."""

    def __init__(
        self,
        name: str,
        queue: TransferQueue,
        log: EventLog,
        activity: Activity,
        score: Score,
        *,
        samples_per_step: int,
    ) -> None:
        """`score`: computes them. The others: see `Task`."""
        super().__init__(name, queue, log, activity, samples_per_step=samples_per_step, actor="trainer")
        self._score = score

    async def compute(self, claim: Claim, span: Event) -> Outputs:
        """One forward pass over the claim."""
        span.version = 0
        values = await self._score([train_sample(row) for row in claim.rows])
        return {row.id: {"ref_log_probs": cell} for row, cell in zip(claim.rows, values, strict=True)}
