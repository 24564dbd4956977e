"""Greedy accuracy on the held-out prompts."""

import asyncio
import math
import statistics
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Protocol

from tailrace.config.engine import SamplingConfig
from tailrace.engine.base import SampleStream
from tailrace.events import EventLog
from tailrace.metrics import failure_metrics, reward_metrics
from tailrace.rewards.base import FailureReport, Grade, GradingRequest
from tailrace.rewards.pool import GraderPool
from tailrace.rollout.worker import Decode
from tailrace.types import Prompt, Request, Sample


class Generator(Protocol):
    """What generates: an engine, or several behind one face."""

    def submit(self, requests: Sequence[Request]) -> SampleStream | AsyncGenerator[Sample, None]:
        """See `Engine.submit`; the samples are made with the newest weights."""


class Evaluator:
    """Answers every held-out prompt greedily and grades the answers."""

    def __init__(
        self,
        engine: Generator,
        pool: GraderPool,
        prompts: tuple[Prompt, ...],
        sampling: SamplingConfig,
        decode: Decode,
        log: EventLog,
        *,
        actor: str,
    ) -> None:
        """`actor`: in whose row of the timeline it stands."""
        self._engine = engine
        self._pool = pool
        self._failures = FailureReport()
        self._prompts = prompts
        self._sampling = sampling.model_copy(update={"temperature": 0.0})
        self._decode = decode
        self._log = log
        self._actor = actor

    async def run(self, step: int) -> dict[str, float]:
        """Evaluate the engine's weights, after `step` training steps; accuracy, reward, failures and mean length."""
        with self._log.span("evaluation", self._actor, step=step, samples=len(self._prompts)) as span:
            span.version = step
            async with aclosing(self._engine.submit(self._requests())) as samples, asyncio.TaskGroup() as grading:
                graded = []
                lengths = []
                async for sample in samples:
                    lengths.append(len(sample.response_ids))
                    graded.append(grading.create_task(self._grade(sample)))
            span.tokens = sum(lengths)
            grades = [task.result() for task in graded]
            span.metrics = _summary(grades, lengths)
            span.info = self._failures.info(grades)
        return span.metrics

    def _requests(self) -> list[Request]:
        """Negative ids, which no training row has."""
        return [
            Request(request_id=-1 - k, group_id=-1 - k, prompt_ids=prompt.prompt_ids, sampling=self._sampling, seed=0)
            for k, prompt in enumerate(self._prompts)
        ]

    async def _grade(self, sample: Sample) -> Grade:
        prompt = self._prompts[-1 - sample.request_id]
        response = self._decode(sample.response_ids.tolist())
        return await self._pool.grade(
            GradingRequest(
                prompt=prompt.text,
                question=prompt.question,
                response=response,
                answer=prompt.answer,
                metadata=prompt.metadata,
                tokens=sample.response_ids.tolist(),
                finish_reason=sample.finish_reason.value,
            )
        )


def _summary(grades: list[Grade], lengths: list[int]) -> dict[str, float]:
    rewards = [math.nan if grade.reward is None else grade.reward for grade in grades]
    return {
        **reward_metrics(rewards, [grade.parts for grade in grades]),
        **failure_metrics(grade.error for grade in grades),
        "response_tokens": statistics.fmean(lengths),
    }
