"""Decides whether the samples of a group may go to several engines, where different lengths are expected of them."""

from tailrace.planning.dispatch.base import EngineState

_PROMPT_SHARE = 0.5
"""The most that computing a prompt once more may cost, as a part of a response to it in a full batch."""


def is_cheap_to_split(engine: EngineState, *, prompt_tokens: int, response_tokens: float) -> bool:
    """Whether to compute a group's prompt once more costs less than a response to it, in a full batch.

    A batch stands still while a prompt is computed. `response_tokens`: expected of each, in the mean.
    """
    size, tokens = engine.slots, response_tokens
    response_s = tokens * engine.times.step_s(engine.tp, size, size * (prompt_tokens + tokens / 2), 1) / size
    return engine.times.prefill_s(engine.tp, 1, prompt_tokens) <= _PROMPT_SHARE * response_s
