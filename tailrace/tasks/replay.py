"""Replay of a trace (`pipeline.replay`): responses of given lengths, with waits in place of tools and graders.

    LocalPort ──▶ ReplayStream ──first turns──▶ engine ──▶ tools (a wait) ──next turn──▶ engine ──▶ …  ──▶ a sample
    RewardTask's place ──▶ ReplayRewardTask: waits, and gives the trace's reward

Each turn after the first is a request of its own, whose prompt is the whole conversation. Where the trace has no
rewards, the samples of a group get 0 and 1 by turns, so that the update has something to do.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tailrace.activity import Activity
from tailrace.engine.base import Engine, SampleStream
from tailrace.errors import EngineError
from tailrace.events import Event
from tailrace.tasks.base import Outputs, Task
from tailrace.tasks.context import TaskContext
from tailrace.transfer.queue.base import Claim, Row
from tailrace.types import FinishReason, IntArray, Request, Sample

if TYPE_CHECKING:
    from tailrace.workloads.replay import Replay, Script


def load_replay(path: str | None) -> "Replay | None":
    """Read the trace of `pipeline.replay`; None without one.

    Raises:
        TraceError: the file is not a trace, or damaged.
    """
    if path is None:
        return None
    from tailrace.workloads.files import read_trace  # slow: only where a run plays a trace
    from tailrace.workloads.replay import Replay

    return Replay.of(read_trace(Path(path)))


def can_continue(engine: Engine, replay: "Replay | None") -> bool:
    """Whether responses that were begun can go on: in a replay, those of one turn."""
    return engine.continues and (replay is None or not replay.has_turns)


def replaying(
    engine: Engine, activity: Activity, replay: "Replay | None"
) -> Callable[[Sequence[Request]], SampleStream]:
    """What stands in for `engine.submit` where a trace is played. Evaluations are not touched."""
    if replay is None:
        return engine.submit

    def submit(requests: Sequence[Request]) -> SampleStream:
        if all(request.group_id < 0 for request in requests):
            return engine.submit(requests)
        scripts = {request.request_id: replay.script(request.group_id, request.number) for request in requests}
        return ReplayStream(engine, activity, requests, scripts)

    return submit


def response_mask(script: "Script") -> IntArray:
    """[R]: 1 for the tokens that the model generates, 0 for those that tools return."""
    parts = [(turn.generated_tokens, turn.returned_tokens) for turn in script.turns]
    return np.repeat([1, 0] * len(parts), [tokens for part in parts for tokens in part])


class ReplayStream(SampleStream):
    """The responses to some requests, each as its script says."""

    def __init__(
        self, engine: Engine, activity: Activity, requests: Sequence[Request], scripts: Mapping[int, "Script"]
    ) -> None:
        """`activity`: that of the engine's worker, which waits for tools. `scripts`: by request id."""
        self._engine = engine
        self._activity = activity
        self._scripts = scripts
        self._left = len(requests)
        self._finished: asyncio.Queue[Sample | BaseException] = asyncio.Queue()
        self._first = engine.submit([_forced(request, self._turn(request, 0)) for request in requests])
        self._requests = {request.request_id: request.without_cache() for request in requests}
        self._tasks: set[asyncio.Task[None]] = set()
        self._begin(self._start())

    async def __anext__(self) -> Sample:
        """See `Engine.submit`."""
        if not self._left:
            raise StopAsyncIteration
        answer = await self._finished.get()
        self._left -= 1
        if isinstance(answer, BaseException):
            raise answer
        return answer

    async def aclose(self) -> None:
        """See `SampleStream`."""
        self._left = 0
        for task in self._tasks:
            task.cancel()
        try:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        finally:
            await self._first.aclose()

    def _turn(self, request: Request, number: int) -> int:
        return self._scripts[request.request_id].turns[number].generated_tokens

    def _begin(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_end)

    def _on_end(self, task: asyncio.Task[None]) -> None:
        """Hand on the error of a task, of whatever kind: without it, `__anext__` would wait for ever."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._finished.put_nowait(error)

    async def _start(self) -> None:
        """Hand on the responses of one turn; let the others go on."""
        missing = set(self._requests)
        async for sample in self._first:
            missing.discard(sample.request_id)
            if sample.finish_reason is FinishReason.ABORT:
                self._finished.put_nowait(sample)  # it goes on elsewhere; see `can_continue`
            elif len(self._scripts[sample.request_id].turns) == 1:
                self._finish(sample)
            else:
                self._begin(self._converse(sample))
        if missing:
            raise EngineError(f"the engine ended its stream without samples of {len(missing)} requests")

    async def _converse(self, sample: Sample) -> None:
        """Make the turns after the first."""
        request, script = self._requests[sample.request_id], self._scripts[sample.request_id]
        for before, turn in zip(script.turns, script.turns[1:], strict=False):
            with self._activity.waiting("tools"):
                await asyncio.sleep(before.tool_s)
            sample = _with_answer(sample, request, before.returned_tokens)
            context = np.concatenate([request.prompt_ids, sample.response_ids])
            following = _forced(replace(request, prompt_ids=context), turn.generated_tokens)
            async with aclosing(self._engine.submit([following])) as stream:
                made = await anext(stream, None)
            if made is None:
                raise EngineError("the engine ended its stream without a sample")
            sample = _joined(sample, made)
        self._finish(sample)

    def _finish(self, sample: Sample) -> None:
        """Hand on a response, with the end that its script has: to the engine, each turn was cut at its limit.

        Raises:
            EngineError: the engine has not made as many tokens as it was asked for.
        """
        script, tokens = self._scripts[sample.request_id], len(sample.response_ids)
        if tokens != script.tokens:
            raise EngineError(
                f"the engine gave a response of {tokens} tokens in group {sample.group_id}, where the replayed trace "
                f"has {script.tokens}; a replay needs an engine that heeds `ignore_eos` and `max_new_tokens`"
            )
        self._finished.put_nowait(replace(sample, finish_reason=script.finish_reason))


def _forced(request: Request, tokens: int) -> Request:
    return replace(request, sampling=request.sampling.model_copy(update={"max_new_tokens": tokens, "ignore_eos": True}))


def _with_answer(sample: Sample, request: Request, tokens: int) -> Sample:
    """The response with what the tools return: any tokens do, such as those of the prompt. They are certain."""
    answer = np.resize(request.prompt_ids, tokens)
    return replace(
        sample,
        response_ids=np.concatenate([sample.response_ids, answer]),
        rollout_log_probs=np.concatenate([sample.rollout_log_probs, np.zeros(tokens, np.float32)]),
        weight_versions=np.concatenate([sample.weight_versions, np.repeat(sample.weight_versions[-1:], tokens)]),
    )


def _joined(before: Sample, after: Sample) -> Sample:
    return replace(
        after,
        response_ids=np.concatenate([before.response_ids, after.response_ids]),
        rollout_log_probs=np.concatenate([before.rollout_log_probs, after.rollout_log_probs]),
        weight_versions=np.concatenate([before.weight_versions, after.weight_versions]),
    )


class ReplayRewardTask(Task):
    """Stands in for the reward task: it waits as long as the grading took, and writes the trace's reward."""

    def __init__(self, context: TaskContext, name: str, replay: "Replay", *, workers: int) -> None:
        """`name`: see `Task`. `workers`: the claims that are graded at a time."""
        super().__init__(context, name, workers=workers)
        self._replay = replay
        self._group_size = context.config.algorithm.group_size

    async def compute(self, claim: Claim, span: Event) -> Outputs:
        """Wait, as a grader would take the rows one after the other."""
        scripts = {row.id: (row, self._replay.script(row.group_id, self._sample(row))) for row in claim.rows}
        with self._activity.busy("reward"):
            await asyncio.sleep(sum(script.reward_s for _, script in scripts.values()))
        rewards = {key: self._reward(row, script) for key, (row, script) in scripts.items()}
        span.info = {"graded": [(row.group_id, self._sample(row), rewards[key]) for key, (row, _) in scripts.items()]}
        return {key: {"reward": reward, "reward_error": "", "reward_parts": {}} for key, reward in rewards.items()}

    def _sample(self, row: Row) -> int:
        return row.order % self._group_size

    def _reward(self, row: Row, script: "Script") -> float:
        return float(self._sample(row) % 2) if script.reward is None else script.reward
