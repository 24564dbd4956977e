"""Admission of prompts: the rows of a training step enter the queue once the weights are new enough for it.

put(step)          its groups ──▶ queue: they wait for weight version `step` - `max_staleness`, then for room
put_lost_groups    groups whose rows were lost or remade ──▶ queue, at once

A group that was lost comes again as it was. One that was remade comes with another prompt, at the same place of the
run: each time of the run has a seeded order of its own, so that the n-th remaking of a place is always the same.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np

from tailrace.errors import GroupExists, QueueClosed, QueueTimeout, StaleRowError, StorageFull
from tailrace.planning.admission import oldest_version
from tailrace.planning.kl_control import KlCoefficients
from tailrace.prompts.order import PromptOrder, sample_seed
from tailrace.prompts.task_name import task_name
from tailrace.transfer.queue.base import NewRow, TransferQueue
from tailrace.types import Prompt, WeightVersion

_NOT_YET = (QueueTimeout, StorageFull, StaleRowError)
"""Errors of a put that may do later: the queue was full, its units had no room, or they died and are restarted."""


class PromptFeeder:
    """Puts the prompts of each step, `group_size` rows a prompt, in a seeded order.

    The prompt at position k of the run is group k; its sample j is row k * group_size + j of the run.
    """

    def __init__(
        self,
        queue: TransferQueue,
        prompts: tuple[Prompt, ...],
        *,
        seed: int,
        shuffle: bool,
        group_size: int,
        groups_per_step: int,
        max_staleness: int = 0,
        kl: KlCoefficients | None = None,
    ) -> None:
        """`kl`: the coefficients of an adaptive KL penalty, which the rows then have."""
        self.next_step = 0
        """First step whose prompts have not been put. A checkpoint stores it as the data position."""
        self._resumed = False
        """Whether the next step may be in the queue already."""
        self._queue = queue
        self._prompts = prompts
        self._order = PromptOrder(count=len(prompts), seed=seed, shuffle=shuffle)
        self._seed = seed
        self._group_size = group_size
        self._groups_per_step = groups_per_step
        self._max_staleness = max_staleness
        self._kl = kl
        self._step_ended = asyncio.Event()

    def resume_at(self, next_step: int) -> None:
        """Go on from the data position of a checkpoint, with the queue as it was then.

        Puts may have happened after the position was noted: then the queue has the rows of some steps from `next_step`
        on already, and maybe some groups of one more.
        """
        self.next_step = next_step
        self._resumed = True

    def resume_kl(self, trained_steps: int, coefficients: Sequence[float]) -> None:
        """Go on with the coefficients of a checkpoint: see `KlCoefficients.restore`."""
        if self._kl is not None:
            self._kl.restore(trained_steps, coefficients)

    def follow_kl(self, coefficient: float) -> None:
        """One more step has ended, and led to this coefficient of the KL penalty."""
        if self._kl is not None:
            self._kl.follow(coefficient)
            self._step_ended.set()

    async def run(self, steps: int) -> None:
        """Put the rows of every step before `steps`, each as soon as it is admitted."""
        while self.next_step < steps:
            with suppress(*_NOT_YET):  # updates take as long as they take; waits for these rows have limits
                await self.put(self.next_step)

    async def put(self, step: int) -> None:
        """Put the rows of `step`, unless a resumed run has them already.

        Waits until the queue has heard of a weight version that may generate for `step`, then while the queue is full.
        With an adaptive KL penalty, waits until the steps have ended that its coefficient depends on.
        Raises:
            GroupExists: another process has put them.
        """
        if step < self.next_step:
            return
        while self._kl is not None and self._kl.of_step(step) is None:
            self._step_ended.clear()
            await self._step_ended.wait()
        first = step * self._groups_per_step
        positions = range(first, first + self._groups_per_step)
        not_before = oldest_version(step, self._max_staleness)
        groups = [self._group(k, not_before=not_before) for k in positions]
        try:
            await self._queue.put([row for group in groups for row in group])
            self._resumed = False
        except GroupExists:
            if not self._resumed:
                raise
            for group in groups:  # a queue of several controllers may have had room for some of them alone
                with suppress(GroupExists):
                    await self._queue.put(group)
        self.next_step = step + 1

    def group_again(self, group_id: int, remade: int) -> list[NewRow]:
        """The rows of a group that was admitted before, and was lost, or remade so often."""
        return self._group(group_id, not_before=0, remade=remade)

    def _group(self, position: int, *, not_before: WeightVersion, remade: int = 0) -> list[NewRow]:
        seed = remade_seed(self._seed, remade)
        order = self._order
        if remade:
            order = PromptOrder(count=len(self._prompts), seed=seed, shuffle=True)
        prompt = self._prompts[order[position]]
        rows = group_rows(prompt, position, group_size=self._group_size, seed=seed, not_before=not_before)
        if self._kl is None:
            return rows
        coefficient = self._kl.of_step(position // self._groups_per_step)
        return [replace(row, cells={**row.cells, "kl_coefficient": coefficient}) for row in rows]


class PromptLine:
    """Prompts that a caller adds one after the other. They wait to be admitted, in the order of their steps.

    The n-th prompt is group n; `groups_per_step` of them are a step.
    """

    def __init__(
        self, queue: TransferQueue, *, seed: int, group_size: int, groups_per_step: int, max_staleness: int
    ) -> None:
        self._queue = queue
        self._seed = seed
        self._group_size = group_size
        self._groups_per_step = groups_per_step
        self._max_staleness = max_staleness
        self._prompts: list[Prompt] = []
        """All prompts ever added. A group may be lost until its rows are acked, and only the queue knows of that."""
        self._more = asyncio.Event()

    def add(self, prompts: Sequence[Prompt]) -> None:
        """Add prompts after all others."""
        self._prompts.extend(prompts)
        self._more.set()

    async def run(self) -> None:
        """Put each prompt as soon as it is admitted. A put that finds the queue closed ends it."""
        position = 0
        with suppress(QueueClosed):
            while True:
                while position == len(self._prompts):
                    self._more.clear()
                    await self._more.wait()  # until the caller adds some
                step = position // self._groups_per_step
                end = min(len(self._prompts), (step + 1) * self._groups_per_step)
                oldest = oldest_version(step, self._max_staleness)
                with suppress(*_NOT_YET):  # updates take as long as they take; waits for these rows have limits
                    await self._queue.put([row for k in range(position, end) for row in self._group(k, oldest)])
                    position = end

    def group_again(self, group_id: int, remade: int) -> list[NewRow]:
        """The rows of a group that was admitted before, and was lost, or remade so often: with other seeds then.

        It keeps its prompt, since all prompts are the caller's.
        """
        return self._group(group_id, 0, remade)

    def _group(self, position: int, not_before: WeightVersion, remade: int = 0) -> list[NewRow]:
        prompt, size = self._prompts[position], self._group_size
        seed = remade_seed(self._seed, remade)
        return group_rows(prompt, position, group_size=size, seed=seed, not_before=not_before)


async def put_lost_groups(queue: TransferQueue, group_again: Callable[[int, int], Sequence[NewRow]]) -> None:
    """Put groups again that were lost with a storage unit or remade, until the queue is closed.

    A group that finds no room within the queue's limit stays lost, and is tried again. `group_again`: returns the rows
    of a group that was remade so often; they wait for no weights.
    """
    with suppress(QueueClosed):
        while True:
            with suppress(*_NOT_YET):  # nothing was lost for that long, or there was no room
                for group_id, remade in (await queue.lost_groups()).items():
                    with suppress(GroupExists):  # the first step of a resumed run may have put it meanwhile
                        await queue.put(group_again(group_id, remade))


def remade_seed(seed: int, remade: int) -> int:
    """The seed in place of the run's for groups that were remade so often."""
    return sample_seed(seed, -remade, 0) if remade else seed


def group_rows(prompt: Prompt, position: int, *, group_size: int, seed: int, not_before: WeightVersion) -> list[NewRow]:
    """Make the rows of the prompt at `position` of the run. `seed`: the run's."""
    return [
        NewRow(
            group_id=position,
            group_size=group_size,
            order=position * group_size + sample,
            not_before=not_before,
            cells={
                "prompt_ids": prompt.prompt_ids.astype(np.int64, copy=False),
                "prompt": prompt.text,
                "question": prompt.question,
                "answer": prompt.answer,
                "metadata": prompt.metadata,
                "task": task_name(prompt.metadata),
                "seed": sample_seed(seed, position, sample),
            },
        )
        for sample in range(group_size)
    ]
