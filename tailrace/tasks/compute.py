"""The task that runs an algorithm's own function, such as the advantages of a group."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from tailrace.algorithms.table import Cells, Compute
from tailrace.errors import AlgorithmError
from tailrace.events import Event
from tailrace.host.user_code import describe
from tailrace.tasks.base import Outputs, Task
from tailrace.tasks.context import TaskContext
from tailrace.transfer.queue.base import Claim, Row, RowId
from tailrace.transfer.queue.holding import remake_if_held
from tailrace.types import Value

T = TypeVar("T")

REMADE = "remade_groups"
"""The metric of an event: groups that were thrown away, and whose places another prompt gets."""


class ComputeTask(Task):
    """Writes the outputs of the function for the rows of each group, or of a whole training step."""

    def __init__(self, context: TaskContext, name: str, work: Compute) -> None:
        """`name`: see `Task`. `work`: holds the function."""
        of_step = work.of == "step"
        super().__init__(context, name, rows=context.samples_per_step if of_step else None)
        self._function = work.function
        self._of_step = of_step
        self._remake = work.remake

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
            for group_id in await self._remade(claim, groups, span):
                del groups[group_id]
            for group in groups.values():
                outputs.update(await asyncio.to_thread(self._of_rows, group))
        return outputs

    async def _remade(self, claim: Claim, groups: Mapping[int, list[Row]], span: Event) -> list[int]:
        """Have groups remade that are of no use; return those that are."""
        if self._remake is None:
            return []
        wanted = [number for number, rows in groups.items() if self._call(self._remake.wanted, rows)]
        if not wanted:
            return []
        taken = await remake_if_held(self._queue, claim, wanted, most=self._remake.most)
        span.metrics = {**span.metrics, REMADE: float(len(taken))}
        return taken

    def _call(self, function: Callable[[Sequence[Cells]], T], rows: list[Row]) -> T:
        try:
            return function([row.cells for row in rows])
        except Exception as error:  # the code of an algorithm may raise anything
            raise AlgorithmError(f"task {self._name!r} of the algorithm has failed: {describe(error)}") from error

    def _of_rows(self, rows: list[Row]) -> Outputs:
        cells = self._call(lambda of_rows: list(self._function(of_rows)), rows)
        if len(cells) != len(rows):
            raise AlgorithmError(
                f"task {self._name!r} of the algorithm returned cells for {len(cells)} rows, and it was "
                f"called with {len(rows)}; return one mapping for each"
            )
        return {row.id: own for row, own in zip(rows, cells, strict=True)}
