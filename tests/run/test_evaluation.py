"""Evaluations: the requests, the ways to answer, and the figures from the answers."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from itertools import zip_longest
from statistics import fmean
from typing import Any, cast

import numpy as np
import pytest

from tailrace.config.engine import SamplingConfig
from tailrace.config.evaluation import EvaluationConfig
from tailrace.errors import NothingGraded
from tailrace.events import Event, EventLog
from tailrace.report.samples import samples_in
from tailrace.rewards.base import CORRECT, Grade, GradingRequest
from tailrace.rewards.graders import Graders
from tailrace.run.evaluation import Answer, Evaluator, figures, ways_of
from tailrace.run.recording import SampleRecorder
from tailrace.types import FinishReason, Prompt, Request, Sample


def prompt(number: int) -> Prompt:
    return Prompt(prompt_id=f"p{number}", text=f"t{number}", question=f"q{number}", prompt_ids=np.array([number + 1]))


class Echo:
    """An engine that answers each request with the low bit of its seed, and a greedy request with a 1."""

    def __init__(self) -> None:
        self.requests: list[Request] = []

    async def submit(self, requests: Sequence[Request]) -> AsyncGenerator[Sample, None]:
        self.requests.extend(requests)
        for request in reversed(requests):  # the order in which they finish must not matter
            token = request.seed % 2 if request.sampling.temperature else 1
            yield Sample(
                request_id=request.request_id,
                group_id=request.group_id,
                response_ids=np.array([token]),
                rollout_log_probs=np.zeros(1, np.float32),
                weight_versions=np.zeros(1, np.int64),
                finish_reason=FinishReason.STOP,
            )


class Ones:
    """A grader for which only the response "1" is right."""

    async def grade(self, request: GradingRequest, *_: Any) -> Grade:
        await asyncio.sleep(0)
        right = float(request.response == "1")
        return Grade(reward=right / 2, parts={CORRECT: right})


def evaluator(
    log: EventLog, engine: Echo, sets: dict[str, list[Prompt]], seed: int = 0, keep: Any = None, **config: Any
) -> Evaluator:
    ways = ways_of(EvaluationConfig(**config), SamplingConfig(temperature=0.7, top_k=5))
    graders = cast(Graders, Ones())
    return Evaluator(engine, graders, sets, ways, lambda ids: str(ids[0]), log, seed=seed, actor="engine", keep=keep)


def test_greedy_answers_each_prompt_once(log: EventLog, events: list[Event]) -> None:
    engine = Echo()
    metrics = asyncio.run(evaluator(log, engine, {"held_out": [prompt(0), prompt(1)]}).run(3))
    assert [request.sampling.temperature for request in engine.requests] == [0, 0]
    assert (metrics["accuracy"], metrics["reward"], metrics["response_tokens"]) == (1, 0.5, 1)
    assert not [name for name in metrics if "@" in name or "sampled" in name]
    assert (events[0].task, events[0].step, events[0].samples, events[0].metrics) == ("evaluation", 3, 2, metrics)


def test_sampled_answers_stand_beside_greedy_ones(log: EventLog) -> None:
    engine = Echo()
    answers: list[Answer] = []
    sets = {"held_out": [prompt(0), prompt(1)], "hard": [prompt(2)]}
    metrics = asyncio.run(evaluator(log, engine, sets, samples=6, temperature=0.4).run(0, answers.append))
    assert len(answers) == len({(a.set, a.number, a.way, a.index) for a in answers}) == 3 * 7
    sampled = [a for a in answers if a.way == "sampled"]
    assert {request.sampling.temperature for request in engine.requests} == {0, 0.4}
    assert {request.sampling.top_k for request in engine.requests} == {5}
    assert metrics["accuracy"] == 1
    assert metrics["sampled/accuracy"] == fmean(a.response == "1" for a in sampled)
    assert metrics["hard/sampled/accuracy"] == fmean(a.response == "1" for a in sampled if a.set == "hard")
    assert {name for name in metrics if name.startswith("sampled/pass@")} == {f"sampled/pass@{k}" for k in (2, 4, 6)}


def test_the_texts_of_some_prompts_of_each_set_are_told_in_the_order_of_the_prompts(
    log: EventLog, events: list[Event]
) -> None:
    recorder = SampleRecorder(groups=1, characters=100, seed=3)
    sets = {"held_out": [prompt(0), prompt(1)], "hard": [prompt(2)]}
    evaluation = evaluator(log, Echo(), sets, samples=2, keep=recorder.of_evaluation)
    for step in (0, 5):
        asyncio.run(evaluation.run(step))
    first, second = (samples_in(event) for event in events if event.task == "samples")
    assert [(one.set, one.way, one.sample) for one in first] == [
        (name, way, place) for name in sets for place, way in enumerate(("greedy", "sampled", "sampled"))
    ]
    greedy = [one for one in first if one.way == "greedy"]
    assert [(one.group, one.response, one.reward, one.correct) for one in greedy][1] == (2, "1", 0.5, True)
    assert [(one.group, one.step) for one in second] == [(one.group, 5) for one in first], "the same prompts each time"


def test_requests_of_a_group_have_one_prompt_and_one_way(log: EventLog) -> None:
    engine = Echo()
    asyncio.run(evaluator(log, engine, {"a": [prompt(0)], "b": [prompt(1)]}, samples=2).run(0))
    groups: dict[int, set[tuple[int, float]]] = {}
    for request in engine.requests:
        groups.setdefault(request.group_id, set()).add((int(request.prompt_ids[0]), request.sampling.temperature))
    assert [len(kinds) for kinds in groups.values()] == [1] * 4
    assert all(request.request_id < 0 > request.group_id for request in engine.requests)
    assert len({request.request_id for request in engine.requests}) == 6


def test_each_evaluation_of_a_seed_samples_alike(log: EventLog) -> None:
    seeds = []
    for seed in (0, 0, 1):
        engine = Echo()
        asyncio.run(evaluator(log, engine, {"a": [prompt(0)]}, seed=seed, greedy=False, samples=3).run(0))
        seeds.append([request.seed for request in engine.requests])
    assert seeds[0] == seeds[1] != seeds[2]
    assert len(set(seeds[0])) == 3


def test_without_greedy_the_sampled_figures_have_no_prefix(log: EventLog) -> None:
    metrics = asyncio.run(evaluator(log, Echo(), {"a": [prompt(0)]}, greedy=False, samples=4).run(0))
    assert {"accuracy", "reward", "pass@2", "pass@4"} <= metrics.keys()
    assert not [name for name in metrics if name.startswith("sampled/")]


def graded(number: int, *correct: bool | None, final_answers: str = "") -> list[Answer]:
    """The answers to a prompt; None stands for one that could not be graded.

    `final_answers`: a letter for each, where a space is no answer; without it, the grader says nothing of them.
    """
    return [
        Answer(
            set="a",
            number=number,
            prompt=prompt(number),
            way="greedy",
            index=index,
            sample=cast(Sample, type("Made", (), {"response_ids": [1, 2]})()),
            response="",
            grade=Grade(reward=None, error="died: x")
            if right is None
            else Grade(reward=1.0, parts={CORRECT: right}, final_answer=final and final.strip()),
        )
        for index, (right, final) in enumerate(zip_longest(correct, final_answers))
    ]


def test_ungraded_answers_are_no_wrong_answers() -> None:
    answers = [*graded(0, True, None, False, None), *graded(1, False, False, False, False), *graded(2, None)]
    metrics = figures(answers, ["a"], ["greedy"])
    assert metrics["accuracy"] == pytest.approx(1 / 6)
    assert metrics["pass@2"] == pytest.approx((1 + 0) / 2)  # of prompt 0 alone: one of its two graded answers is right
    assert metrics["pass@4"] == 0  # of prompt 1 alone
    assert (metrics["reward_failures"], metrics["reward_failures/died"]) == (3, 3)


def test_the_answer_of_most_counts_for_maj_at_k() -> None:
    answers = [
        *graded(0, True, True, False, False, final_answers="7753"),
        *graded(1, False, None, False, True, final_answers="5x57"),
        *graded(2, False, False, False, True, final_answers="   7"),
    ]
    metrics = figures(answers, ["a"], ["greedy"])
    assert metrics["maj@4"] == pytest.approx((1 + 1) / 2)  # of the prompts 0 and 2: 7 has two votes, and one
    assert metrics["maj@2"] == pytest.approx((1 / 2 + 1 / 3 + 1 / 2) / 3)
    assert metrics["pass@4"] == 1
    of_prompt_0 = [*graded(0, True, True, False, False, final_answers="7753")]
    assert figures(of_prompt_0[::-1], ["a"], ["greedy"]) == figures(of_prompt_0, ["a"], ["greedy"])


def test_there_is_no_vote_where_the_grader_says_nothing_of_final_answers() -> None:
    metrics = figures(graded(0, True, False), ["a"], ["greedy"])
    assert "pass@2" in metrics
    assert not [name for name in metrics if name.startswith("maj@")]


def test_nothing_is_said_of_correctness_where_no_grader_does() -> None:
    assert not {"accuracy", "pass@2"} & figures(graded(0, None, None), ["a"], ["greedy"]).keys()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"greedy": False}, "nothing would be answered"),
        ({"temperature": 0.5}, "for no samples"),
        ({"samples": -1}, "greater than"),
    ],
)
def test_an_evaluation_that_would_do_nothing_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EvaluationConfig(**config)


class Fails(Ones):
    """A grader that fails, except for the first prompt in the evaluations `succeed`."""

    def __init__(self, *succeed: int) -> None:
        self._succeed = succeed
        self.evaluation = 0

    async def grade(self, request: GradingRequest, *_: Any) -> Grade:
        if self.evaluation in self._succeed and request.prompt == "t0":
            return await super().grade(request)
        return Grade(reward=None, error="NameError: name 'x' is not defined (my.py, line 3)", traceback="my.py")


@pytest.mark.parametrize(("succeed", "stops_at"), [((), 0), ((0,), None), ((1,), 0)])
def test_a_first_evaluation_without_a_grade_ends_the_run_with_the_error(
    log: EventLog, events: list[Event], succeed: tuple[int, ...], stops_at: int | None
) -> None:
    graders, errors = Fails(*succeed), []
    ways = ways_of(EvaluationConfig(), SamplingConfig())
    sets = {"held_out": [prompt(0), prompt(1)]}
    evaluations = Evaluator(
        Echo(), cast(Graders, graders), sets, ways, lambda ids: str(ids[0]), log, seed=0, actor="engine"
    )
    for graders.evaluation in range(3):
        try:
            asyncio.run(evaluations.run(graders.evaluation))
        except NothingGraded as error:
            errors.append((graders.evaluation, str(error)))
            break
    assert [evaluation for evaluation, _ in errors] == ([] if stops_at is None else [stops_at])
    assert all("NameError: name 'x' is not defined (my.py, line 3)" in text for _, text in errors)
    assert events[0].info["tracebacks"] == {"NameError": "my.py"}, "it is told before the run ends"
