"""The task that runs an algorithm's own function, such as the advantages of a group."""

import asyncio
from collections.abc import Mapping

from tailrace.algorithms.table import Compute
from tailrace.errors import AlgorithmError
from tailrace.events import Event
from tailrace.host.user_code import describe
from tailrace.tasks.base import Outputs, Task
from tailrace.tasks.context import TaskContext
from tailrace.transfer.queue.base import Claim, Row, RowId
from tailrace.types import Value


class ComputeTask(Task):
    """Writes the outputs of the function for the rows of each group, or of a whole training step."""

    def __init__(self, context: TaskContext, name: str, work: Compute) -> None:
        """`name`: see `Task`. `work`: holds the function."""
        of_step = work.of == "step"
        super().__init__(context, name, rows=context.samples_per_step if of_step else None)
        self._function = work.function
        self._of_step = of_step

    async def compute(self, claim: Claim, span: Event) -> Outputs:
        """Call the function for each group of the claim, or for all of it, in a thread: it may take any time.

        Raises:
            AlgorithmError: the function has failed, or has not returned the cells of each row.
        """
        groups: dict[int, list[Row]] = {}
        for row in sorted(claim.rows, key=lambda row: row.order):
            groups.setdefault(0 if self._of_step else row.group_id, []).append(row)
        outputs: dict[RowId, Mapping[str, Value]] = {}
        with self._activity.busy("advantage"):
            for group in groups.values():
                outputs.update(await asyncio.to_thread(self._of_rows, group))
        return outputs

    def _of_rows(self, rows: list[Row]) -> Outputs:
        try:
            cells = list(self._function([row.cells for row in rows]))
        except Exception as error:  # the code of an algorithm may raise anything
            raise AlgorithmError(f"task {self._name!r} of the algorithm has failed: {describe(error)}") from error
        if len(cells) != len(rows):
            raise AlgorithmError(
                f"task {self._name!r} of the algorithm returned cells for {len(cells)} rows, and it was "
                f"called with {len(rows)}; return one mapping for each"
            )
        return {row.id: own for row, own in zip(rows, cells, strict=True)}
