"""The task that runs an algorithm's own function, such as the advantages of a group."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
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
        self._oldest = context.config.pipeline.max_staleness
        """The age in steps of the oldest one that may come again while another is computed."""
        self._known: dict[int, dict[int, Row]] = {}
        """The newest rows of these steps, by step and place, where the function gets whole steps."""

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
        given = self._with_others(rows) if self._of_step else rows
        cells = self._call(lambda of_rows: list(self._function(of_rows)), given)
        if len(cells) != len(given):
            raise AlgorithmError(
                f"task {self._name!r} of the algorithm returned cells for {len(cells)} rows, and it was "
                f"called with {len(given)}; return one mapping for each"
            )
        wanted = {row.id for row in rows}
        return {row.id: own for row, own in zip(given, cells, strict=True) if row.id in wanted}

    def _with_others(self, rows: list[Row]) -> list[Row]:
        """The rows, among those of their step that were computed before, in the order of the run.

        A part of a step comes again when a unit of the queue dies. It gets what it has as a part of the step.
        """
        step = rows[0].order // self._samples_per_step
        known = self._known.setdefault(step, {})
        # Copies, since the queue's own memory is used again.
        known.update((row.order, replace(row, cells=deepcopy(dict(row.cells)))) for row in rows)
        self._known = {number: of_step for number, of_step in self._known.items() if number >= step - self._oldest}
        return [known[place] for place in sorted(known)]
