"""The error, before a run generates anything, about answers that no response can equal."""

import warnings
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter

from tailrace.config.rewards import Grader, RewardsConfig
from tailrace.errors import TailraceWarning, UserError
from tailrace.rewards.answers import check_answers
from tailrace.types import Prompt

SOLUTION = "She has 3 * 4 = 12.\n#### 12"


def prompts(*answers: str | None, metadata: dict[str, Any] | None = None) -> list[Prompt]:
    return [
        Prompt(
            prompt_id=f"data:{number}",
            text="t",
            question="q",
            prompt_ids=np.arange(1),
            answer=answer,
            metadata=metadata or {},
        )
        for number, answer in enumerate(answers)
    ]


def config(**grader: Any) -> RewardsConfig:
    made: Any = TypeAdapter(Grader).validate_python(grader)
    return RewardsConfig(grader=made, workers=1)


async def said(rewards: RewardsConfig, asked: list[Prompt]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        await check_answers(rewards, {"prompts.source": asked})
    return [str(warning.message) for warning in caught if issubclass(warning.category, TailraceWarning)]


@pytest.mark.parametrize(
    ("grader", "answers", "says"),
    [
        (
            {"type": "regex", "pattern": r"-?\d+"},
            ["12", SOLUTION, SOLUTION],
            (2, 3, "can never be what rewards.grader."),
        ),
        ({"type": "regex", "pattern": ".*"}, ["x", ""], (1, 2, "can never be what rewards.grader.pattern finds")),
        ({"type": "exact"}, [SOLUTION, "x"], (1, 2, "are empty or have several lines")),
        ({"type": "exact"}, ["x", "", " "], (2, 3, "are empty or have several lines")),
        ({"type": "integer"}, ["-12", "4.2", "12"], (1, 3, "are no integer, such as")),
        ({"type": "math"}, ["", "12", None], (2, 3, "are no mathematical expression")),
        ({"type": "math"}, ["5", "5 dogs"], (1, 2, "are no mathematical expression, or are a number among words")),
    ],
)
async def test_answers_that_no_response_can_equal_are_counted_and_quoted(
    grader: dict[str, Any], answers: list[str | None], says: tuple[int, int, str]
) -> None:
    (warning,) = await said(config(**grader), prompts(*answers))
    doubted, looked_at, why = says
    assert f"{doubted} of {looked_at} answers of prompts.source that were looked at {why}" in warning
    assert "prompts.source.answer_pattern" in warning
    assert "\n" not in warning


async def test_a_validation_set_is_doubted_by_its_own_key() -> None:
    with pytest.warns(TailraceWarning) as caught:
        await check_answers(
            config(type="exact"), {"prompts.source": prompts("12"), "prompts.validation.hard": prompts(SOLUTION)}
        )
    (text,) = [str(warning.message) for warning in caught]
    assert "1 of 1 answers of prompts.validation.hard that were looked at" in text
    assert "with prompts.validation.hard.answer_pattern" in text


async def test_nothing_is_said_of_answers_that_a_response_can_equal() -> None:
    many = [str(number) for number in range(1000)]
    assert await said(config(type="regex", pattern=r"#### (-?\d+)"), prompts(*many)) == []


async def test_nothing_is_said_of_a_pattern_that_takes_for_ever() -> None:
    rewards = config(type="regex", pattern="((a+)+)").model_copy(update={"timeout_s": 0.3})
    assert await said(rewards, prompts("a" * 64 + "b")) == []


JUDGE = {"type": "judge", "url": "http://localhost:1/v1", "model": "m"}
COMPARES = {**JUDGE, "prompt": "{answer} or {response}?"}


@pytest.mark.parametrize("grader", [{"type": "exact"}, {"type": "regex", "pattern": "a"}, {"type": "math"}, COMPARES])
async def test_a_grader_that_compares_needs_answers(grader: dict[str, Any]) -> None:
    says = r"none of the 2 prompts of prompts\.validation\.x has one; set prompts\.validation\.x\.answer_column"
    with pytest.raises(UserError, match=says):
        await check_answers(
            config(**grader), {"prompts.source": prompts("1"), "prompts.validation.x": prompts(None, "")}
        )


async def test_the_scorers_of_reasoning_gym_need_its_problems() -> None:
    with pytest.raises(UserError, match="scores problems of its own tasks, and that of data:0 is none"):
        await check_answers(config(type="reasoning_gym"), {"prompts.source": prompts("12")})


async def test_a_judge_is_not_asked_before_the_run() -> None:
    assert await said(config(**JUDGE), prompts(None)) == []
    assert await said(config(**COMPARES), prompts("1")) == []


async def test_functions_are_not_asked() -> None:
    assert await said(config(type="function", path="no.such_function"), prompts(None)) == []
    assert await said(config(type="given", name="f", python="3.11", pickled="no function"), prompts(None)) == []
