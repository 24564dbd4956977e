"""Evaluation: graded answers to prompts that are not trained on; greedy, sampled, or both.

sets of prompts × ways ──requests──▶ engine ──each sample as it finishes──▶ graders ──▶ Answer ──▶ figures
"""

import asyncio
import math
import statistics
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from tailrace.config.engine import SamplingConfig
from tailrace.config.evaluation import EvaluationConfig
from tailrace.engine.base import SampleStream
from tailrace.errors import NothingGraded
from tailrace.events import EventLog
from tailrace.prompts.order import evaluation_seed
from tailrace.registers.events import EventKind
from tailrace.report.samples import SampleRecord, samples_event
from tailrace.rewards.base import FailureReport, Grade, GradingRequest
from tailrace.rewards.graders import Graders, Group
from tailrace.rewards.spending import spent_metrics
from tailrace.run.step_metrics import failure_metrics, reward_metrics
from tailrace.statistics.attempts import MOST_VOTES, majority_at_k, pass_at_k, sizes
from tailrace.tasks.context import Decode
from tailrace.types import Prompt, Request, Sample

GREEDY = "greedy"
SAMPLED = "sampled"


class Generator(Protocol):
    """A generator of samples: one engine, or several behind one interface."""

    def submit(self, requests: Sequence[Request]) -> SampleStream | AsyncGenerator[Sample, None]:
        """Generate with the newest weights; see `Engine.submit`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A way to answer prompts."""

    name: str
    """`greedy` or `sampled`."""
    samples: int
    """Number of answers to each prompt."""
    sampling: SamplingConfig


def ways_of(config: EvaluationConfig, sampling: SamplingConfig) -> tuple[Way, ...]:
    """The ways of a configuration. Figures without a prefix are of the first one. `sampling`: the run's."""
    ways = []
    if config.greedy:
        ways.append(Way(name=GREEDY, samples=1, sampling=sampling.model_copy(update={"temperature": 0.0})))
    if config.samples:
        temperature = sampling.temperature if config.temperature is None else config.temperature
        sampled = sampling.model_copy(update={"temperature": temperature})
        ways.append(Way(name=SAMPLED, samples=config.samples, sampling=sampled))
    return tuple(ways)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A graded answer of an evaluation."""

    set: str
    """Name of the prompt's set."""
    number: int
    """Number of the prompt among all that are evaluated, from 0."""
    prompt: Prompt
    way: str
    """`greedy` or `sampled`."""
    index: int
    """Number of this answer among the prompt's answers in this way, from 0."""
    sample: Sample
    response: str
    """Text of the answer."""
    grade: Grade


class Evaluator:
    """Answers every prompt of some sets and grades the answers."""

    def __init__(
        self,
        engine: Generator,
        graders: Graders,
        sets: Mapping[str, Sequence[Prompt]],
        ways: Sequence[Way],
        decode: Decode,
        log: EventLog,
        *,
        seed: int,
        actor: str,
        keep: Callable[[Sequence[Answer], int], Sequence[SampleRecord]] | None = None,
    ) -> None:
        """`sets`: prompts by the name of their set. `seed`: for sampled answers; each evaluation uses the same seeds.

        `actor`: the line of the timeline for its events. `keep`: chooses the answers that people look at, by default
        none; it is given all answers and the number of trained steps.
        """
        self._engine = engine
        self._graders = graders
        self._failures = FailureReport()
        self._has_graded = False
        """Whether a grading has ever succeeded. One set of prompts is small, and may fail as a whole by chance."""
        prompts = [(name, prompt) for name, of_set in sets.items() for prompt in of_set]
        self._sets = tuple(sets)
        self._ways = tuple(ways)
        self._asked = [
            (set_name, number, prompt, way, index)
            for way in ways
            for number, (set_name, prompt) in enumerate(prompts)
            for index in range(way.samples)
        ]
        self._decode = decode
        self._log = log
        self._seed = seed
        self._actor = actor
        self._keep = keep

    @property
    def count(self) -> int:
        """Number of answers of an evaluation."""
        return len(self._asked)

    async def run(
        self,
        step: int,
        each: Callable[[Answer], None] | None = None,
        generated: Callable[[], Awaitable[None]] | None = None,
    ) -> dict[str, float]:
        """Evaluate the engine's weights after `step` training steps. Returns the figures; see `figures`.

        Args:
            step: the version of the weights. The requests are submitted before this waits for anything.
            each: called with each answer.
            generated: called when the last answer is generated. Until then the caller leaves the weights as they are.

        Raises:
            NothingGraded: all gradings have failed, and no earlier evaluation had one that succeeded.
        """
        with self._log.span(EventKind.EVALUATION, self._actor, step=step, samples=self.count) as span:
            span.version = step
            answers = await self._answers(each, generated)
            span.tokens = sum(len(answer.sample.response_ids) for answer in answers)
            ways = [way.name for way in self._ways]
            span.metrics = await asyncio.to_thread(figures, answers, self._sets, ways)  # votes of many take seconds
            span.info = self._failures.info([answer.grade for answer in answers])
        if kept := self._keep(answers, step) if self._keep else ():
            self._log.emit(samples_event(kept, actor=self._actor, time=span.end, step=step))
        errors = [answer.grade.error for answer in answers]
        if not self._has_graded:
            NothingGraded.check(errors, "the first evaluation")
        self._has_graded = True
        return span.metrics

    async def _answers(
        self, each: Callable[[Answer], None] | None, generated: Callable[[], Awaitable[None]] | None
    ) -> list[Answer]:
        graded = []
        groups = {(number, way.name): Group(way.samples) for _, number, _, way, _ in self._asked}
        async with aclosing(self._engine.submit(self._requests())) as samples, asyncio.TaskGroup() as grading:
            async for sample in samples:
                graded.append(grading.create_task(self._graded(sample, groups, each)))
            if generated is not None:
                await generated()
        return [task.result() for task in graded]

    def _requests(self) -> list[Request]:
        """The requests. Their ids are negative, as no training row's are. A group is one prompt asked in one way."""
        groups: dict[tuple[str, int], int] = {}
        return [
            Request(
                request_id=-1 - k,
                group_id=-2 - groups.setdefault((way.name, number), len(groups)),  # -1: of no group
                prompt_ids=prompt.prompt_ids,
                sampling=way.sampling,
                seed=evaluation_seed(self._seed, number, index),
            )
            for k, (_, number, prompt, way, index) in enumerate(self._asked)
        ]

    async def _graded(
        self, sample: Sample, groups: Mapping[tuple[int, str], Group], each: Callable[[Answer], None] | None
    ) -> Answer:
        set_name, number, prompt, way, index = self._asked[-1 - sample.request_id]
        response = self._decode(sample.response_ids.tolist())
        grade = await self._graders.grade(GradingRequest.of(prompt, sample, response), groups[number, way.name], index)
        answer = Answer(
            set=set_name,
            number=number,
            prompt=prompt,
            way=way.name,
            index=index,
            sample=sample,
            response=response,
            grade=grade,
        )
        if each is not None:
            each(answer)
        return answer


def figures(answers: Sequence[Answer], sets: Sequence[str], ways: Sequence[str]) -> dict[str, float]:
    """All figures of an evaluation, by name.

    The answers of the first way together have: accuracy, reward, failures, `response_tokens` (the mean), and `pass@k`
    where a prompt has several answers. `sampled/…` are the same figures of a second way. With several sets,
    `<set>/…` are the same figures of one set.
    """
    groups = named_groups(answers, sets, ways)
    return {f"{prefix}{name}": value for prefix, group in groups.items() for name, value in _summary(group).items()}


def named_groups(answers: Sequence[Answer], sets: Sequence[str], ways: Sequence[str]) -> dict[str, list[Answer]]:
    """The answers behind the figures, by the prefix of their names; see `figures`."""
    return {
        prefix: [answer for answer in answers if answer.way == way and of_set in (None, answer.set)]
        for prefix, way, of_set in prefixes(sets, ways)
    }


def prefixes(sets: Sequence[str], ways: Sequence[str]) -> Iterator[tuple[str, str, str | None]]:
    """Yield the prefixes of the names of figures, each with the way and the set of its answers; None for all sets."""
    for way in ways:
        prefix = "" if way == ways[0] else f"{way}/"
        yield prefix, way, None
        yield from ((f"{of_set}/{prefix}", way, of_set) for of_set in sets if len(sets) > 1)


def _summary(answers: Sequence[Answer]) -> dict[str, float]:
    if not answers:
        return {}
    grades = [answer.grade for answer in answers]
    rewards = [math.nan if grade.reward is None else grade.reward for grade in grades]
    return {
        **reward_metrics(rewards, [grade.parts for grade in grades]),
        **{name: statistics.fmean(scores) for name, scores in of_several_by_prompt(answers).items()},
        **failure_metrics(grade.error for grade in grades),
        **spent_metrics(grades),
        "response_tokens": statistics.fmean(len(answer.sample.response_ids) for answer in answers),
    }


def of_several_by_prompt(answers: Iterable[Answer]) -> dict[str, list[float]]:
    """What k answers to a prompt are worth, for each prompt: `pass@k` and `maj@k`, for the k of `sizes`.

    Each is the unbiased estimate for one prompt. Answers without a verdict of the grader do not count. A prompt with
    fewer than k others is left out. There is a vote where the grader says what responses answer.
    """
    judged, votes = judged_by_prompt(answers), _votes_by_prompt(answers)
    most = max(map(len, judged), default=0)
    scores = {}
    for k in sizes(most):
        scores[f"pass@{k}"] = [pass_at_k(len(right), sum(right), k) for right in judged if len(right) >= k]
        voting = [of_prompt for of_prompt in votes if len(of_prompt) >= k]
        if voting and (k <= MOST_VOTES or k == most):
            scores[f"maj@{k}"] = [majority_at_k(of_prompt, k) for of_prompt in voting]
    return scores


def judged_by_prompt(answers: Iterable[Answer]) -> list[list[bool]]:
    """The grader's verdicts on the answers to each prompt. Answers and prompts without a verdict are left out."""
    by_prompt: dict[int, list[bool]] = {}
    for answer in answers:
        if answer.grade.correct is not None:
            by_prompt.setdefault(answer.number, []).append(answer.grade.correct)
    return list(by_prompt.values())


def _votes_by_prompt(answers: Iterable[Answer]) -> list[list[tuple[str, bool]]]:
    """What the judged answers to each prompt come to, and whether that is right."""
    by_prompt: dict[int, list[tuple[str, bool]]] = {}
    for answer in answers:
        grade = answer.grade
        if grade.correct is not None and grade.final_answer is not None:
            by_prompt.setdefault(answer.number, []).append((grade.final_answer, grade.correct))
    return list(by_prompt.values())
