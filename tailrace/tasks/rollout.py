"""The rollout task.

    queue ──claim prompts──▶ engine.submit ──each sample as it finishes──▶ ack ──▶ reward …

Claims never wait for one another: new prompts join the engine's batch while older ones are still generating.

Waiting: where the engine has a bound, a claim waits for room in it, so that the prompts that it cannot start are left
to other workers. Claimed prompts wait for weights that may generate for their step (`WeightsGate`). When an ack shows
that the claim has ended, its generation stops: the other rows go back, or come again, and the engine drops them.
"""

import asyncio
import itertools
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack, aclosing, contextmanager
from typing import TYPE_CHECKING, cast

import numpy as np

from tailrace.engine.base import SampleStream
from tailrace.errors import EngineError
from tailrace.events import Event
from tailrace.planning.admission import oldest_version
from tailrace.registers.events import EventKind
from tailrace.tasks.context import Generation, TaskContext
from tailrace.tasks.replay import ReplayStream, load_replay, response_mask
from tailrace.transfer.queue.base import Claim, Row
from tailrace.transfer.queue.holding import VOID, ack_if_held, give_back, held, next_claim
from tailrace.types import IntArray, Request, Sample, Value

if TYPE_CHECKING:
    from tailrace.workloads.replay import Replay, Script

_ROUNDING = 0.01
"""The most by which a log-probability may exceed 0."""


class RolloutTask:
    """Generates a response for every row, with the engine's weights of the moment."""

    def __init__(self, context: TaskContext, name: str, generation: Generation) -> None:
        """`name`: the task's name in the table. `generation`: the engine and what belongs to it."""
        config = context.config
        self._name = name
        self._queue = context.queue
        self._activity = context.activity
        self._log = context.log
        self._samples_per_step = context.samples_per_step
        self._group_size = config.algorithm.group_size
        self._sampling = config.sampling
        self._max_staleness = config.pipeline.max_staleness
        self._engine = generation.engine
        self._replay = None if config.pipeline.replay is None else load_replay(config.pipeline.replay)
        self._decode = generation.decode
        self._room = _Room(generation.room, config.algorithm.group_size)
        self._gate = generation.gate
        self._request_ids = itertools.count()
        """Makes new ids, also for rows that come again: the engine may still have the old request."""

    async def run(self) -> None:
        """Serve until the queue is closed."""
        not_started: dict[int, Claim] = {}
        try:
            async with asyncio.TaskGroup() as generations:
                while (claim := await self._claim()) is not None:
                    not_started[claim.lease_id] = claim
                    generations.create_task(self._generate(claim, not_started))
        finally:
            # a task that is cancelled before its first step cannot give its rows back itself
            await give_back(self._queue, not_started.values())

    async def _claim(self) -> Claim | None:
        """Wait for room, then for a claim; None when the queue is closed."""
        limit = await self._room.some()
        with self._activity.waiting("data"):
            claim = await next_claim(self._queue, self._name, limit=limit)
        if claim is not None:
            self._room.take(len(claim.rows))
        return claim

    async def _generate(self, claim: Claim, not_started: dict[int, Claim]) -> None:
        del not_started[claim.lease_id]
        # rows that were given back may come with rows of the next step, which need newer weights
        steps = sorted(self._step(row) for row in claim.rows)
        async with AsyncExitStack() as stack:
            taken = stack.enter_context(self._room.taken(len(claim.rows)))
            await stack.enter_async_context(held(self._queue, claim))
            await stack.enter_async_context(self._gate.generating(oldest_version(steps[-1], self._max_staleness)))
            with self._log.span(EventKind.ROLLOUT, "rollout", step=steps[0], samples=len(claim.rows)) as span:
                span.version = self._engine.stats().version
                await self._stream(claim, span, taken)

    def _step(self, row: Row) -> int:
        """The training step of a row."""
        return row.order // self._samples_per_step

    async def _stream(self, claim: Claim, span: Event, taken: "_Taken") -> None:
        """Ack each sample as it finishes, while the claim is good. `span` gets the number of tokens."""
        rows = {next(self._request_ids): row for row in claim.rows}
        start = self._log.now()
        span.tokens = 0
        async with aclosing(self._submit(rows)) as samples:
            async for sample in samples:
                row = _row_of(sample, rows)
                mask = self._mask(sample, row)
                tokens = int(mask.sum())
                span.tokens += tokens
                taken.free(1)
                if not await ack_if_held(self._queue, claim, {row.id: self._outputs(sample, mask)}):
                    span.info = VOID
                    return
                self._log.emit(self._sample_event(sample, row, start, tokens))
        if rows:
            raise EngineError(
                f"the engine ended its stream without samples of {len(rows)} of {len(claim.rows)} requests; "
                "`submit` gives one of each, or raises an error"
            )

    def _submit(self, rows: Mapping[int, Row]) -> SampleStream:
        requests = [self._request(number, row) for number, row in rows.items()]
        if self._replay is None:
            return self._engine.submit(requests)
        scripts = {number: self._script(self._replay, row) for number, row in rows.items()}
        return ReplayStream(self._engine, self._activity, requests, scripts)

    def _script(self, replay: "Replay", row: Row) -> "Script":
        return replay.script(row.group_id, row.order % self._group_size)

    def _request(self, number: int, row: Row) -> Request:
        prompt_ids, seed = row.cells["prompt_ids"], row.cells["seed"]
        assert isinstance(prompt_ids, np.ndarray)
        assert isinstance(seed, int)
        return Request(
            request_id=number, group_id=row.group_id, prompt_ids=prompt_ids, sampling=self._sampling, seed=seed
        )

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

    def _sample_event(self, sample: Sample, row: Row, start: float, tokens: int) -> Event:
        return Event(
            task=EventKind.SAMPLE,
            actor="engine",
            start=start,
            end=self._log.now(),
            step=self._step(row),
            tokens=tokens,
            version=int(sample.weight_versions[0]),
            info={
                "group": sample.group_id,
                "sample": row.order % self._group_size,
                "prompt_tokens": len(cast("IntArray", row.cells["prompt_ids"])),
                "finish_reason": sample.finish_reason.value,
                "last_version": int(sample.weight_versions[-1]),
            },
        )


def _row_of(sample: Sample, rows: dict[int, Row]) -> Row:
    """Take the row of a sample out of `rows`, which are by request id, and check the sample."""
    row = rows.pop(sample.request_id, None)
    if row is None:
        raise EngineError(
            f"the engine gave a sample of request {sample.request_id} that it was not asked for, or twice"
        )
    _check_sample(sample, row)
    return row


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


class _Room:
    """The number of rows that may still be claimed."""

    def __init__(self, rows: int | None, group_size: int) -> None:
        self._free = None if rows is None else max(rows, group_size)
        self._group_size = group_size
        self._news = asyncio.Event()

    async def some(self) -> int | None:
        """Wait until a group has room. Returns the number of rows; None for any number."""
        while self._free is not None and self._free < self._group_size:
            self._news.clear()
            await self._news.wait()
        return self._free

    def take(self, rows: int) -> None:
        """Count rows that were claimed. From then on `taken` keeps count."""
        if self._free is not None:
            self._free -= rows

    def free(self, rows: int) -> None:
        """Count rows that are finished."""
        if self._free is not None:
            self._free += rows
            self._news.set()

    @contextmanager
    def taken(self, rows: int) -> Iterator["_Taken"]:
        """Free the rest of `rows` at the end of the block."""
        taken = _Taken(self, rows)
        try:
            yield taken
        finally:
            taken.free(taken.rows)


class _Taken:
    """The unfinished rows of one claim."""

    def __init__(self, room: _Room, rows: int) -> None:
        self.rows = rows
        self._room = room

    def free(self, rows: int) -> None:
        """Count `rows` as finished."""
        self.rows -= rows
        self._room.free(rows)
