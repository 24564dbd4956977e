"""The task that scores each token of a response with a model, such as the log-probabilities of a reference."""

from tailrace.events import Event
from tailrace.tasks.actor import train_sample
from tailrace.tasks.base import Outputs, Task
from tailrace.tasks.context import Score, TaskContext
from tailrace.transfer.queue.base import Claim
from tailrace.types import WeightVersion


class ScoringTask(Task):
    """Writes one column: the model's scores."""

    def __init__(
        self, context: TaskContext, name: str, score: Score, column: str, *, version: WeightVersion | None = None
    ) -> None:
        """`name`: see `Task`. `score`: computes the cells of `column`.

        `version`: the version of the policy whose weights score; None if they are another model's.
        """
        super().__init__(context, name, actor="trainer")
        self._score = score
        self._column = column
        self._version = version

    async def compute(self, claim: Claim, span: Event) -> Outputs:
        """Score the claim."""
        span.version = self._version
        values = await self._score([train_sample(row) for row in claim.rows])
        return {row.id: {self._column: cell} for row, cell in zip(claim.rows, values, strict=True)}
