"""The advantage task: rewards of a whole group become an advantage for each token."""

from typing import Any, cast

import numpy as np

from tailrace.activity import Activity
from tailrace.algorithms.base import Algorithm
from tailrace.events import Event, EventLog
from tailrace.tasks.base import Outputs, Task
from tailrace.transfer.queue.base import Claim, Row, TransferQueue


class AdvantageTask(Task):
    """Writes `advantages` from the `reward` of every sample of a group."""

    name = "advantage"
    actor = "advantage"

    def __init__(
        self,
        queue: TransferQueue,
        log: EventLog,
        algorithm: Algorithm,
        *,
        samples_per_step: int,
        activity: Activity | None = None,
    ) -> None:
        super().__init__(queue, log, samples_per_step=samples_per_step, activity=activity)
        self._algorithm = algorithm

    async def compute(self, claim: Claim, span: Event) -> Outputs:
        """One pass over the claim's groups, which are whole."""
        groups: dict[int, list[Row]] = {}
        for row in claim.rows:
            groups.setdefault(row.group_id, []).append(row)
        return {
            row.id: {"advantages": np.full(len(_mask(row)), advantage, np.float32)}
            for group in groups.values()
            for row, advantage in zip(group, self._group_advantages(group), strict=True)
        }

    def _group_advantages(self, group: list[Row]) -> list[float]:
        return self._algorithm.advantages([cast(float, row.cells["reward"]) for row in group])


def _mask(row: Row) -> np.ndarray[Any, Any]:
    return cast("np.ndarray[Any, Any]", row.cells["response_mask"])
