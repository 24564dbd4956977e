"""Schemas of rewards."""

from typing import Annotated, Literal

from pydantic import Field

from tailrace.config.base import Config, Keywords, Processes, Seconds
from tailrace.config.patterns import Pattern, Which

MAX_PICKLED_CHARS = 2**19
"""Maximum number of characters of a function in a recipe."""


class ExactReward(Config):
    """Reward 1 where the response, stripped of white space, equals the answer."""

    type: Literal["exact"] = "exact"
    ignore_case: bool = False
    """Treat upper and lower case as the same."""


class RegexReward(Config):
    """Reward 1 where the chosen match of a pattern in the response equals the answer; group 1 counts where there is
    one."""

    type: Literal["regex"] = "regex"
    pattern: Pattern
    """A Python regular expression, such as -?\\d+"""
    match: Which = "last"
    """Which match is the response's answer."""


class MathReward(Config):
    """Reward 1 where the response's final expression equals the answer mathematically, by math-verify."""

    type: Literal["math"] = "math"
    pattern: Pattern | None = None
    """A pattern whose match (group 1 where there is one) is read as LaTeX; null lets math-verify search the whole
    response."""
    match: Which = "last"
    """Which match of `pattern` is the response's answer."""


class ReasoningGymReward(Config):
    """The scorer of the reasoning-gym task that made the prompt. It scores the part of the response that `pattern`
    finds."""

    type: Literal["reasoning_gym"] = "reasoning_gym"
    pattern: Pattern | None = None
    """A pattern whose last match (group 1 where there is one) is scored; null scores the whole response."""


class FunctionReward(Config):
    """Any Python function, `def` or `async def`. It returns a number, a truth value, or a mapping with `reward` and
    other figures by name.

    The function receives by name those of these arguments that it has parameters for: response, answer, question,
    prompt, metadata, tokens, finish_reason.
    """

    type: Literal["function"] = "function"
    path: str
    """Dotted path, such as my_package.rewards.score; the working directory is importable."""
    arguments: Keywords = {}
    """Further keyword arguments of the function."""
    concurrency: Annotated[int, Field(ge=1, le=1024)] = 16
    """Number of gradings at a time in each of the `workers`, where the function is asynchronous."""


class GivenReward(Config):
    """A function of the program that started the run, `Trainer(recipe, reward=f)`, which writes this section. It is
    called like a function of `type: function`. Whoever starts a recipe with it runs its code."""

    type: Literal["given"] = "given"
    name: Annotated[str, Field(max_length=100)]
    """Name of the function, for people."""
    python: Annotated[str, Field(max_length=10)]
    """Version of Python that wrote the function and that it needs."""
    pickled: Annotated[str, Field(max_length=MAX_PICKLED_CHARS)]
    """The function, as dill and base64 write it. Modules are included by name alone, all else in full."""
    arguments: Keywords = {}
    """Further keyword arguments of the function."""
    concurrency: Annotated[int, Field(ge=1, le=1024)] = 16
    """Number of gradings at a time in each of the `workers`, where the function is asynchronous."""


Grader = Annotated[
    ExactReward | RegexReward | MathReward | ReasoningGymReward | FunctionReward | GivenReward,
    Field(discriminator="type"),
]


class RewardsConfig(Config):
    """The reward function and the processes that run it."""

    grader: Grader
    workers: Processes = 2
    """Processes that grade; each can be killed without harm."""
    timeout_s: Seconds = 10.0
    """Seconds that a grading may take; a longer one is killed and counts as failed."""
    retries: Annotated[int, Field(ge=0, le=1000)] = 0
    """Number of further attempts at a response whose grading failed."""
    correct_at: Annotated[float, Field(ge=-1e6, le=1e6)] | None = None
    """A response with at least this reward counts as correct in `accuracy`. By default the grader decides: exact, regex
    and math do, reasoning_gym at a score of 1, and a function by a truth value or a part `correct`."""
    failure_reward: Annotated[float, Field(ge=-1e6, le=1e6)] | None = None
    """Reward of a response whose grading failed; null leaves the sample out of its group and of the update. A step
    without a successful grading ends the run all the same."""
