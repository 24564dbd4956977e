"""The data calls of AsyncFlow's user-level interface (section 5.1), over a queue in separate processes.

    put_prompts_data ──▶ rows ──get_experience_data──▶ TensorBatch ── a model ──put_experience_data──▶ output columns

The names are the paper's; the calls are the queue's put, claim and ack. Columns are tensors, see `tensors`. The other
calls of the interface start engines and give them weights: `tailrace.Trainer.init_engines`.
"""

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress

import msgspec
import numpy as np

from tailrace.errors import ColumnError, GroupExists, PeerLost, QueueClosed, QueueError, QueueTimeout, on_failure
from tailrace.transfer.queue.adapters.tensors import (
    Column,
    Layout,
    TensorBatch,
    check_layouts,
    make_batch,
    make_cells,
    make_outputs,
)
from tailrace.transfer.queue.base import NewRow
from tailrace.transfer.queue.client.sync_queue import SyncQueue
from tailrace.types import WeightVersion


class Experience:
    """The data interface of a program that trains or generates, used in the thread of its `queue`.

        with SyncQueue(QueueAddress.read(path), name="trainer") as queue:
            experience = Experience(queue)
            experience.put_prompts_data({"prompt_ids": prompts}, group_size=8)
            batch = experience.get_experience_data("reward", count=32)
            with queue.held(batch.claim):
                experience.put_experience_data(batch, {"reward": score(batch.columns)})

    For everything else (giving a batch back, new weights, counts, closing) call the queue itself. A batch's claim is
    `TensorBatch.claim`.
    """

    def __init__(self, queue: SyncQueue, *, first_group: int = 0) -> None:
        """`first_group`: the group_id of the first prompt that is put; the next prompts count on from it.

        Several programs that put prompts into one queue need separate ranges. So does a program that goes on where
        another stopped.
        """
        self._queue = queue
        self._next_group = first_group
        self._doubtful: list[NewRow] = []
        """The rows of a put that has failed, though some or all of them may be in the queue."""

    def put_prompts_data(
        self,
        prompts: Mapping[str, Column],
        *,
        group_size: int,
        samples: Mapping[str, Column] | None = None,
        not_before: WeightVersion = 0,
        timeout: float | None = None,
    ) -> list[int]:
        """Put `group_size` rows for each prompt; wait until there is room. Return the group_ids.

        If the queue can never hold so many rows at once, put them in several calls. A put enters all rows or none,
        unless it raises PeerLost, or the queue has several controllers, each of which takes its rows. Put the same
        prompts again then: they are in the queue once, even if the first put had succeeded. Where other prompts are
        put instead, those of the failed put enter before them.

        `prompts`: columns with a cell for each prompt. `samples`: columns whose cells differ within a group, such as
        seeds. They have a cell for each row: the rows of the first prompt, then of the second, and so on.
        `not_before`: see `NewRow`.

        Raises:
            ColumnError: columns of different length, or cells that the table does not expect.
            QueueError, GroupExists, QueueTimeout, QueueClosed: see `TransferQueue.put`.
            PeerLost: the queue did not answer, and the rows may or may not be in.
        """
        if group_size < 1:
            raise QueueError(f"a group has at least 1 row, got group_size={group_size}")
        kinds = self._queue.columns
        own = make_cells(prompts, kinds)
        more = make_cells(samples, kinds, rows=len(own) * group_size) if samples else None
        groups = list(range(self._next_group, self._next_group + len(own)))
        rows = [
            NewRow(
                group_id=group_id,
                group_size=group_size,
                order=group_id * group_size + sample,
                cells=cells if more is None else cells | more[place * group_size + sample],
                not_before=not_before,
            )
            for place, (group_id, cells) in enumerate(zip(groups, own, strict=True))
            for sample in range(group_size)
        ]
        if self._doubtful:
            is_again = _digest(rows) == _digest(self._doubtful)
            self._put_doubtful(timeout, is_again=is_again)
            if is_again:
                return groups
            return self.put_prompts_data(
                prompts, group_size=group_size, samples=samples, not_before=not_before, timeout=timeout
            )
        try:
            self._queue.put(rows, timeout=timeout)
        except (ColumnError, GroupExists):
            raise
        except QueueError as error:
            if isinstance(error, PeerLost) or self._queue.controllers > 1:
                self._doubtful = rows
            raise
        self._next_group += len(groups)
        return groups

    def _put_doubtful(self, timeout: float | None, *, is_again: bool) -> None:
        """Put those rows of a failed put that are not in. Where they can never be in, they are left out: the caller
        has been told, and is told again only where the same prompts are put again."""
        following = self._doubtful[-1].group_id + 1
        try:
            with suppress(GroupExists):  # they are in
                self._queue.put(self._doubtful, timeout=timeout)
        except QueueError as error:
            if is_again or isinstance(error, (PeerLost, QueueTimeout, QueueClosed)):
                raise
        self._next_group, self._doubtful = following, []

    def get_experience_data(
        self,
        task: str,
        *,
        count: int | None = None,
        rank: int | None = None,
        layouts: Mapping[str, Layout] | None = None,
        timeout: float | None = None,
    ) -> TensorBatch:
        """Claim at most `count` rows for `task`; wait until some are ready. The columns are those that the task reads.

        `rank`, `timeout`: see `TransferQueue.claim`. `layouts`: the layouts of columns of arrays, packed by default.

        Raises:
            ColumnError: a column cannot have its layout; no rows were claimed.
            QueueError, QueueTimeout, QueueClosed: see `TransferQueue.claim`.
        """
        kinds = self._queue.columns
        check_layouts(layouts or {}, self._queue.reads(task), kinds, task=task)
        claim = self._queue.claim(task, limit=count, rank=rank, timeout=timeout)
        with on_failure(self._queue.nack, claim):
            return make_batch(claim, kinds, layouts or {})

    def put_experience_data(self, batch: TensorBatch, outputs: Mapping[str, Column]) -> None:
        """Write the outputs of the batch's task, in the order of its rows, and mark the rows consumed, in one step.

        Raises:
            ColumnError, LeaseError, StaleRowError: see `TransferQueue.ack`.
        """
        self._queue.ack(batch.claim, make_outputs(batch.claim, outputs, self._queue.columns))


def _digest(rows: Sequence[NewRow]) -> bytes:
    """Return a digest that differs for rows with other cells."""
    cells = [(row.group_id, row.group_size, dict(row.cells)) for row in rows]
    return hashlib.sha256(msgspec.msgpack.encode(cells, enc_hook=np.ndarray.tobytes)).digest()
