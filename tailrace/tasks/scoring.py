"""The task that scores: what a model says of each token of a response, such as the log-probabilities of a reference."""

from collections.abc import Awaitable, Callable, Sequence

from tailrace.activity import Activity
from tailrace.events import Event, EventLog
from tailrace.tasks.actor import train_sample
from tailrace.tasks.base import Outputs, Task
from tailrace.trainer.base import TrainSample
from tailrace.transfer.queue.base import Claim, TransferQueue
from tailrace.types import FloatArray, WeightVersion

Score = Callable[[Sequence[TrainSample]], Awaitable[list[FloatArray]]]
"""[R] log-probabilities of the response tokens of each sample."""


class ScoringTask(Task):
    """Writes one column."""

    def __init__(
        self,
        name: str,
        queue: TransferQueue,
        log: EventLog,
        activity: Activity,
        score: Score,
        column: str,
        *,
        samples_per_step: int,
        version: WeightVersion | None = None,
    ) -> None:
        """`score`: computes the cells of `column`, with weights of `version` where they are the policy's.

        The others: see `Task`.
        """
        super().__init__(name, queue, log, activity, samples_per_step=samples_per_step, actor="trainer")
        self._score = score
        self._column = column
        self._version = version

    async def compute(self, claim: Claim, span: Event) -> Outputs:
        """One forward pass over the claim."""
        span.version = self._version
        values = await self._score([train_sample(row) for row in claim.rows])
        return {row.id: {self._column: cell} for row, cell in zip(claim.rows, values, strict=True)}
