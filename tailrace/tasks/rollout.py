"""The rollout task.

    queue ──claim prompts──▶ service.generate ──each sample as it finishes──▶ ack ──▶ reward …

Claims never wait for one another: new prompts join the engines' batches while older ones are still generating. When an
ack shows that the claim has ended, its generation stops: the other rows go back, or come again.

Waiting: claimed prompts wait in the service, for room in an engine and for weights that may generate for their step.
"""

import asyncio
import itertools
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import numpy as np

from tailrace.config.run import RunConfig
from tailrace.errors import EngineError
from tailrace.events import Event, EventLog
from tailrace.planning.admission import oldest_version
from tailrace.planning.lengths.base import Asked
from tailrace.registers.events import EventKind
from tailrace.rollout.service import GenerationService
from tailrace.rollout.streams import Generated
from tailrace.tasks.context import Decode
from tailrace.tasks.replay import load_replay, response_mask
from tailrace.transfer.queue.base import Claim, Row, TransferQueue
from tailrace.transfer.queue.holding import ack_if_held, give_back, held, next_claim
from tailrace.types import IntArray, Request, Sample, Value

if TYPE_CHECKING:
    from tailrace.workloads.replay import Replay, Script

_ROUNDING = 0.01
"""The most by which a log-probability may exceed 0."""


class RolloutTask:
    """Has a response generated for every row."""

    def __init__(
        self,
        queue: TransferQueue,
        name: str,
        service: GenerationService,
        decode: Decode,
        log: EventLog,
        config: RunConfig,
    ) -> None:
        """`name`: the task's name in the table."""
        self._name = name
        self._queue = queue
        self._service = service
        self._log = log
        self._samples_per_step = config.trainer.train_batch_size
        self._group_size = config.algorithm.group_size
        self._sampling = config.sampling
        self._max_staleness = config.pipeline.max_staleness
        self._replay = load_replay(config.pipeline.replay)
        self._expects_lengths = config.rollout.lengths is not None
        self._decode = decode

    async def run(self) -> None:
        """Serve until the queue is closed."""
        not_started: dict[int, Claim] = {}
        try:
            async with asyncio.TaskGroup() as generations:
                while (claim := await next_claim(self._queue, self._name)) is not None:
                    not_started[claim.lease_id] = claim
                    generations.create_task(self._generate(claim, not_started))
        finally:
            # a task that is cancelled before its first step cannot give its rows back itself
            await give_back(self._queue, not_started.values())

    async def _generate(self, claim: Claim, not_started: dict[int, Claim]) -> None:
        """Generate for a claim: for each step by itself, since a later one needs newer weights."""
        del not_started[claim.lease_id]
        async with held(self._queue, claim), asyncio.TaskGroup() as steps:
            for step, rows in itertools.groupby(sorted(claim.rows, key=lambda row: row.order), key=self._step):
                steps.create_task(self._stream(claim, step, list(rows)))

    def _step(self, row: Row) -> int:
        """The training step of a row."""
        return row.order // self._samples_per_step

    async def _stream(self, claim: Claim, step: int, of_step: list[Row]) -> None:
        """Ack each sample as it finishes, while the claim is good."""
        rows = dict(enumerate(of_step))
        requests = [self._request(number, row) for number, row in rows.items()]
        version = oldest_version(step, self._max_staleness)
        asked = None
        if self._expects_lengths:
            asked = self._asked(of_step)
            await self._service.prepare(asked)
        async with aclosing(self._service.generate(requests, version=version, step=step, asked=asked)) as samples:
            async for made in samples:
                row = rows[made.sample.request_id]
                _check_sample(made.sample, row)
                mask = self._mask(made.sample, row)
                if not await ack_if_held(self._queue, claim, {row.id: self._outputs(made.sample, mask)}):
                    return
                self._log.emit(self._sample_event(made, row, int(mask.sum())))

    def _script(self, replay: "Replay", row: Row) -> "Script":
        return replay.script(row.group_id, row.order % self._group_size)

    def _request(self, number: int, row: Row) -> Request:
        prompt_ids, seed = row.cells["prompt_ids"], row.cells["seed"]
        assert isinstance(prompt_ids, np.ndarray)
        assert isinstance(seed, int)
        return Request(
            request_id=number,
            group_id=row.group_id,
            number=row.order % self._group_size,
            prompt_ids=prompt_ids,
            sampling=self._sampling,
            seed=seed,
        )

    def _asked(self, rows: Sequence[Row]) -> list[Asked]:
        """What can be told of the length of each row's response. The text of a group's prompt is made once."""
        of_group: dict[int, Asked] = {}
        for row in rows:
            if row.group_id not in of_group:
                prompt_ids, task = row.cells["prompt_ids"], row.cells["task"]
                assert isinstance(prompt_ids, np.ndarray)
                assert isinstance(task, str)
                ids = prompt_ids.tolist()
                of_group[row.group_id] = Asked.of(len(ids), self._decode(ids), task)
        if self._replay is None:
            return [of_group[row.group_id] for row in rows]
        return [replace(of_group[row.group_id], forced=self._script(self._replay, row).tokens) for row in rows]

    def _mask(self, sample: Sample, row: Row) -> IntArray:
        """[R]: 1 for the tokens that the model has generated."""
        if self._replay is None:
            return np.ones(len(sample.response_ids), np.int64)
        return response_mask(self._script(self._replay, row))

    def _outputs(self, sample: Sample, mask: IntArray) -> dict[str, Value]:
        return {
            "response_ids": sample.response_ids,
            "response_mask": mask,
            "rollout_log_probs": sample.rollout_log_probs,
            "weight_versions": sample.weight_versions,
            "response": self._decode(sample.response_ids.tolist()),
            "finish_reason": sample.finish_reason.value,
        }

    def _sample_event(self, made: Generated, row: Row, tokens: int) -> Event:
        sample = made.sample
        return Event(
            task=EventKind.SAMPLE,
            actor="engine",
            worker=made.worker,
            start=made.start,
            end=made.end,
            step=self._step(row),
            tokens=tokens,
            version=int(sample.weight_versions.min()),
            info={
                "group": sample.group_id,
                "sample": row.order % self._group_size,
                "prompt_tokens": len(cast("IntArray", row.cells["prompt_ids"])),
                "finish_reason": sample.finish_reason.value,
                "last_version": int(sample.weight_versions.max()),
            },
        )


def _check_sample(sample: Sample, row: Row) -> None:
    """Check that a sample can be trained on: an engine may be anybody's."""
    tokens, log_probs = len(sample.response_ids), sample.rollout_log_probs
    given = f"the engine gave sample {row.order} of the run (group {row.group_id})"
    if not tokens:
        raise EngineError(f"{given} a response without a token; one has at least one, be it the end of sequence")
    if not len(log_probs) == len(sample.weight_versions) == tokens:
        raise EngineError(
            f"{given} {tokens} tokens, {len(log_probs)} log-probabilities and {len(sample.weight_versions)} weight "
            "versions; each token has one of both"
        )
    wrong = ~np.isfinite(log_probs) | (log_probs > _ROUNDING)
    if wrong.any():
        raise EngineError(f"{given} the log-probability {log_probs[wrong][0]:g}; it is finite, and not above 0")
