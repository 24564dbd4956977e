"""The data calls of AsyncFlow's user-level interface (section 5.1), over a queue in processes of its own.

    put_prompts_data ──▶ rows ──get_experience_data──▶ TensorBatch ── a model ──put_experience_data──▶ output columns

Names of the paper over the queue's contract: a put, a claim, an ack. Columns are tensors, see `tensors`. The other
calls of the interface start engines and give them weights: `tailrace.Trainer.init_engines`.
"""

import hashlib
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from tailrace.errors import GroupExists, PeerLost, QueueError, on_failure
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
    """What a program that trains or generates says to the queue; for the thread of its `queue`.

        with SyncQueue(QueueAddress.read(path), name="trainer") as queue:
            experience = Experience(queue)
            experience.put_prompts_data({"prompt_ids": prompts}, group_size=8)
            batch = experience.get_experience_data("reward", count=32)
            with queue.held(batch.claim):
                experience.put_experience_data(batch, {"reward": score(batch.columns)})

    Everything else (giving a batch back, new weights, counts, closing) is said to the queue itself, with
    `TensorBatch.claim`.
    """

    def __init__(self, queue: SyncQueue, *, first_group: int = 0) -> None:
        """`first_group`: group_id of the first prompt that is put; those after it count on. Several programs that put
        prompts into one queue, and one that goes on where another stopped, need ranges of their own.
        """
        self._queue = queue
        self._next_group = first_group
        self._doubtful: tuple[int, bytes] | None = None
        """Of rows whose put was not answered, and which are in the queue or not: the group after them, and a digest."""

    def put_prompts_data(
        self,
        prompts: Mapping[str, Column],
        *,
        group_size: int,
        samples: Mapping[str, Column] | None = None,
        not_before: WeightVersion = 0,
        timeout: float | None = None,
    ) -> list[int]:
        """Put `group_size` rows for each prompt, all or none; wait until there is room. Returns the group_ids.

        What the queue can never hold at once is put in pieces, call by call. After PeerLost, put the same prompts
        again: they are in the queue once, whether they had gone in before or not.

        `prompts`: columns with a cell for each prompt. `samples`: columns whose cells differ within a group, such as
        seeds, with one for each row: those of the first prompt, of the second, and so on. `not_before`: see `NewRow`.

        Raises:
            ColumnError: columns of different length, or cells that the table does not expect.
            QueueError, GroupExists, QueueTimeout, QueueClosed: see `TransferQueue.put`.
            PeerLost: the queue did not answer, and the rows are in or not.
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
        try:
            self._queue.put(rows, timeout=timeout)
        except PeerLost:
            self._doubtful = self._next_group + len(groups), _digest(rows)
            raise
        except GroupExists:
            if self._doubtful is None:
                raise
            (following, digest), self._doubtful = self._doubtful, None
            if _digest(rows) != digest:  # a put goes in whole, so those are in, and these come after them
                self._next_group = following
                return self.put_prompts_data(
                    prompts, group_size=group_size, samples=samples, not_before=not_before, timeout=timeout
                )
        self._doubtful = None
        self._next_group += len(groups)
        return groups

    def get_experience_data(
        self,
        task: str,
        *,
        count: int | None = None,
        rank: int | None = None,
        layouts: Mapping[str, Layout] | None = None,
        timeout: float | None = None,
    ) -> TensorBatch:
        """Claim at most `count` rows for `task`; wait until there are some. The columns are those it reads.

        `rank`, `timeout`: see `TransferQueue.claim`. `layouts`: of columns of arrays, packed by default.

        Raises:
            ColumnError: a layout that the column cannot have; no rows were claimed.
            QueueError, QueueTimeout, QueueClosed: see `TransferQueue.claim`.
        """
        kinds = self._queue.columns
        check_layouts(layouts or {}, self._queue.reads(task), kinds, task=task)
        claim = self._queue.claim(task, limit=count, rank=rank, timeout=timeout)
        with on_failure(self._queue.nack, claim):
            return make_batch(claim, kinds, layouts or {})

    def put_experience_data(self, batch: TensorBatch, outputs: Mapping[str, Column]) -> None:
        """Write what the batch's task makes of its rows, in their order, and mark them consumed, in one step.

        Raises:
            ColumnError, LeaseError, StaleRowError: see `TransferQueue.ack`.
        """
        self._queue.ack(batch.claim, make_outputs(batch.claim, outputs, self._queue.columns))


def _digest(rows: Sequence[NewRow]) -> bytes:
    """Tells rows with other cells apart."""
    cells = [(row.group_id, row.group_size, dict(row.cells)) for row in rows]
    return hashlib.sha256(msgspec.msgpack.encode(cells, enc_hook=np.ndarray.tobytes)).digest()
