"""Checks, before anything is generated, whether the grader can find any response to the prompts right.

For example, the pattern `-?\\d+` can never find a worked solution: every reward would be 0, without an error.
"""

import asyncio
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack

from tailrace.config.rewards import (
    ExactReward,
    Grader,
    IntegerReward,
    JudgeReward,
    MathReward,
    ReasoningGymReward,
    RegexReward,
    RewardsConfig,
    grader_key,
)
from tailrace.errors import TailraceWarning, UserError, quoted
from tailrace.rewards.base import Grade, GradingRequest
from tailrace.rewards.graders import Graders
from tailrace.rewards.pool import GraderPool
from tailrace.types import Prompt

_LOOKED_AT = 100
"""The most answers that are checked, spread over the prompts."""
_LIMIT_S = 10.0
"""Seconds for the answers of one set. An answer whose check takes longer counts as fine."""
_COMPARES = ExactReward | RegexReward | IntegerReward | MathReward
_LOOKS_AT_ANSWERS = _COMPARES | ReasoningGymReward
_WHY_NOT = {
    "exact": "are empty or have several lines, and a response has to be the answer letter for letter",
    "regex": "can never be what {key}.pattern finds",
    "integer": "are no integer",
    "math": "are no mathematical expression, or are a number among words, whose letters count as variables",
    "reasoning_gym": "are of no task of reasoning-gym",
}


async def check_answers(
    config: RewardsConfig, sources: Mapping[str, Sequence[Prompt]], graders: Graders | None = None
) -> None:
    """Warn of prompts for which no response can be right.

    Args:
        sources: prompts, by the key of their source in the recipe.
        graders: those to ask; by default new ones.

    Raises:
        UserError: no prompt of a source has an answer that a grader compares with, or a grader cannot be made.
    """
    sets = {key: prompts for key, prompts in sources.items() if prompts}
    for name, grading in config.each.items():
        for key, prompts in sets.items():
            _check_there_are_some(grading.grader, name, key, prompts)
        if not isinstance(grading.grader, _LOOKS_AT_ANSWERS) or not sets:
            continue  # only the grader itself knows how it uses an answer
        async with AsyncExitStack() as stack:
            if graders is None:
                alone = GraderPool(grading.model_copy(update={"workers": 1}), name)
                pool = await stack.enter_async_context(alone)
            else:
                pool = graders.pools[name]
            for key, prompts in sets.items():
                await _check(grading.grader, name, key, prompts, pool)


async def _check(grader: Grader, name: str, key: str, prompts: Sequence[Prompt], pool: GraderPool) -> None:
    looked_at = prompts[:: max(1, len(prompts) // _LOOKED_AT)][:_LOOKED_AT]
    grades = await _ask(pool, looked_at)
    doubted = [prompt for prompt, grade in zip(looked_at, grades, strict=True) if _is_doubtful(grade)]
    if len(doubted) == len(looked_at) and isinstance(grader, ReasoningGymReward):
        raise UserError(
            f"{grader_key(name)}.type reasoning_gym scores problems of its own tasks, and that of "
            f"{looked_at[0].prompt_id} is none; take another grader, or {key}.type=reasoning_gym"
        )
    if doubted:
        warnings.warn(_doubt(grader, name, key, doubted, len(looked_at)), TailraceWarning, stacklevel=3)


def _check_there_are_some(grader: Grader, name: str, key: str, prompts: Sequence[Prompt]) -> None:
    compares = grader.reads_answers if isinstance(grader, JudgeReward) else isinstance(grader, _COMPARES)
    if compares and all(prompt.answer is None or not str(prompt.answer).strip() for prompt in prompts):
        raise UserError(
            f"{grader_key(name)}.type {grader.type} compares responses with answers, and none of the {len(prompts)} "
            f"prompts of {key} has one; set {key}.answer_column, or grade without answers, such as with a function"
        )


async def _ask(pool: GraderPool, prompts: Sequence[Prompt]) -> list[Grade | None]:
    """Check each prompt; None for those without a result within the limit."""
    asked = [asyncio.create_task(pool.can_be_right(_as_response(prompt))) for prompt in prompts]
    _, late = await asyncio.wait(asked, timeout=_LIMIT_S)
    for task in late:
        task.cancel()
    if late:
        await asyncio.wait(late)
    return [None if task in late else task.result() for task in asked]


def _as_response(prompt: Prompt) -> GradingRequest:
    return GradingRequest(
        prompt=prompt.text,
        question=prompt.question,
        response=prompt.answer or "",
        answer=prompt.answer,
        metadata=prompt.metadata,
        tokens=[],
        finish_reason="stop",
    )


def _is_doubtful(grade: Grade | None) -> bool:
    if grade is None or (grade.error or "").startswith(("timeout:", "died:")):
        return False
    return not grade.reward


def _doubt(grader: Grader, name: str, key: str, doubted: Sequence[Prompt], looked_at: int) -> str:
    prompt = doubted[0]
    why = _WHY_NOT[grader.type].format(key=grader_key(name))
    fix = "the pattern, or " if isinstance(grader, RegexReward) else ""
    return (
        f"{len(doubted)} of {looked_at} answers of {key} that were looked at {why}, such as "
        f"that of {prompt.prompt_id}, {quoted(str(prompt.answer))}: a right response gets no reward; mend {fix}the "
        f"answers, maybe with {key}.answer_pattern, which takes the answer out of its column"
    )
