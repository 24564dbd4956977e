"""Events of a training loop of the caller's own, as a run would leave them: steps, samples, the end.

    get_experience_data ─▶ took      put_experience_data ─▶ trained      weight_sync_notify ─▶ step ──▶ events

The caller makes the updates, so their loss and gradients are not known here.
"""

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import replace

from tailrace.config.columns import ColumnKind
from tailrace.config.run import RunConfig
from tailrace.events import Event
from tailrace.registers.events import EventKind
from tailrace.report.samples import samples_event
from tailrace.run.recording import SampleRecorder
from tailrace.run.step_metrics import response_tokens, step_metrics
from tailrace.tasks.actor import StepResult
from tailrace.transfer.queue.adapters.tensors import TensorBatch, make_cells
from tailrace.transfer.queue.base import Row
from tailrace.types import WeightVersion


class LoopDiary:
    """Turns the calls of the loop into events. Used from the loop's thread alone."""

    def __init__(self, config: RunConfig, *, tell: Callable[[Event], None], clock: Callable[[], float]) -> None:
        """`tell`: takes the events. `clock`: returns the seconds since the run began."""
        self._recorder = SampleRecorder.of(config)
        self._tell = tell
        self._clock = clock
        self._began = clock()
        self._version = 0
        self._taken: dict[int, Row] = {}
        """Rows that the loop has claimed, by `order`, as they came."""
        self._trained: dict[int, Row] = {}
        """Rows that the loop has put since the last step, by `order`."""

    def took(self, batch: TensorBatch, kinds: Mapping[str, ColumnKind]) -> None:
        """Record that the loop got a batch of the actor. It has not yet changed the tensors, which it may do later."""
        rows = batch.claim.rows
        for row, cells in zip(rows, make_cells(batch.columns, kinds, rows=len(rows)), strict=True):
            self._taken[row.order] = replace(row, cells=deepcopy(cells))

    def trained(self, batch: TensorBatch) -> None:
        """Record that the loop has put that batch."""
        for row in batch.claim.rows:
            if row.order in self._taken:
                self._trained[row.order] = self._taken.pop(row.order)

    def step(self, version: WeightVersion) -> None:
        """Record that the loop has made weights of `version` from the rows put since the last ones."""
        self._version = version
        rows = tuple(self._trained[order] for order in sorted(self._trained))
        self._trained.clear()
        if not rows:
            return
        start, end = self._began, self._clock()
        self._began = end
        step = version - 1
        if samples := self._recorder.of_step(rows, step):
            self._tell(samples_event(samples, actor="driver", time=end, step=step))
        self._tell(
            Event(
                task=EventKind.STEP,
                actor="driver",
                start=start,
                end=end,
                step=step,
                version=step,
                samples=len(rows),
                tokens=sum(map(response_tokens, rows)),
                metrics=step_metrics(StepResult(rows=rows, updates=()), step, end - start),
            )
        )

    def close(self) -> None:
        """Record that the loop has ended. Rows put since its last weights make up its last step."""
        self.step(self._version + 1)
        now = self._clock()
        self._tell(Event(task=EventKind.END, actor="driver", start=now, end=now, info={"how": "closed"}))
