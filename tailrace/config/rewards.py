"""Schemas of rewards."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, field_validator, model_validator

from tailrace.config.base import (
    Batch,
    Config,
    Count,
    Device,
    Keywords,
    PathText,
    Pattern,
    Processes,
    Seconds,
    key_of,
    with_default,
)
from tailrace.config.engine import DType
from tailrace.config.model import ModelConfig
from tailrace.config.patterns import Which
from tailrace.errors import quoted

Price = Annotated[float, Field(ge=0, le=1e6)]
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


class IntegerReward(Config):
    """Reward 1 where the chosen integer in the response equals the answer, and a part of that for its sign and
    digits. So a group whose responses are all wrong still says which is nearer."""

    type: Literal["integer"] = "integer"
    partial: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """Reward of an integer that is wrong, times the share of its places that are right: the sign, and each digit from
    the last one on. With 0 a wrong one has none."""
    match: Which = "last"
    """Which integer is the response's answer."""


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


class _Called(Config):
    """What a function is called with, and how many times at once."""

    arguments: Keywords = {}
    """Further keyword arguments of the function."""
    concurrency: Annotated[int, Field(ge=1, le=1024)] = 16
    """Number of gradings at a time in each of the `workers`, where the function is asynchronous."""


class FunctionReward(_Called):
    """Any Python function, `def` or `async def`. It returns a number, a truth value, or a mapping with `reward` and
    other figures by name.

    The function receives by name those of these arguments that it has parameters for: response, answer, question,
    prompt, metadata, tokens, finish_reason.
    """

    type: Literal["function"] = "function"
    path: str
    """Dotted path, such as my_package.rewards.score; the working directory is importable."""


class GroupFunctionReward(_Called):
    """A Python function that sees all responses to a prompt at once, `def` or `async def`. It returns a list: for each
    response what a function of `type: function` returns.

    The function receives by name those of these arguments that it has parameters for: responses, answer, question,
    prompt, metadata, tokens, finish_reasons. It is called when the last response of the group has been generated.
    """

    type: Literal["group_function"] = "group_function"
    path: str
    """Dotted path, such as my_package.rewards.rank; the working directory is importable."""


def _is_endpoint(url: str) -> str:
    base = url.rstrip("/")
    try:
        parts = urlsplit(base)
        is_one = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a bad port or IPv6 address
        is_one = False
    if not is_one or re.search(r"[\s@?#]|/completions$", base):
        without_user = re.sub(r"//.*@", "//***@", url)
        raise ValueError(
            f"is {quoted(without_user)}; expected the base URL of an OpenAI-compatible endpoint, such as "
            "http://localhost:8000/v1, without user, query and fragment"
        )
    return base


def _is_key(key: str) -> str:
    if not re.fullmatch(r"[!-~]+", key):
        raise ValueError("is empty, or has white space or other characters that no key has; give the key, or null")
    return key


class JudgeReward(Config):
    """A language model that scores responses, behind any endpoint with OpenAI's API, such as `tailrace serve`, vLLM or
    a provider's.

    With it, `workers` is 1 by default, and `timeout_s` is 60.
    """

    type: Literal["judge"] = "judge"
    url: Annotated[str, AfterValidator(_is_endpoint)]
    """Base URL of the endpoint, such as http://localhost:8000/v1"""
    model: Annotated[str, Field(min_length=1)]
    """Name of the judge, as the endpoint calls it."""
    api_key: Annotated[str, AfterValidator(_is_key)] | None = None
    """Key of the endpoint, such as ${oc.env:JUDGE_KEY}; by default none is sent."""
    prompt: str | None = None
    """What the judge is asked. {question}, {response} and {answer} stand for those of the sample, {lowest} and
    {highest} for the bounds of the score; {response} has to be there. By default it is asked how good the response is,
    from `lowest` to `highest`, without a reference."""
    system_prompt: str | None = None
    """A system message before it."""
    score: Pattern = r"(?i)score[^\w(.-]{0,10}(-?\d*\.?\d+)"
    """A pattern that finds the score in the judge's answer, a number; the last match counts, group 1 where there is
    one."""
    lowest: Annotated[float, Field(ge=-1e6, le=1e6)] = 0.0
    """The worst score, whose reward is 0. A score below it is a failed grading."""
    highest: Annotated[float, Field(ge=-1e6, le=1e6)] = 10.0
    """The best score, whose reward is 1. A score above it is a failed grading."""
    max_tokens: Count | None = 512
    """Maximum number of tokens of the judge's answer; null leaves it to the endpoint."""
    temperature: Annotated[float, Field(ge=0, le=100)] | None = 0.0
    """Temperature of the judge; null leaves it to the endpoint."""
    options: Keywords = {}
    """Further keys of a request, such as {max_completion_tokens: 512} or {reasoning_effort: low}."""
    concurrency: Annotated[int, Field(ge=1, le=1024)] = 16
    """Requests at a time of each of the `workers`."""
    max_retries: Annotated[int, Field(ge=0, le=100)] = 5
    """Further attempts at a request where the judge cannot be reached, is too busy or has an error of its own, within
    the time limit of the grading."""
    backoff_s: Seconds = 0.5
    """Seconds before the first of them, about; each further wait is twice as long, up to 30 s. A wait that the endpoint
    asks for (Retry-After) counts instead, up to 60 s."""
    prompt_price: Price = 0.0
    """Price of a million tokens that the judge reads, for the metric `spent/cost`."""
    completion_price: Price = 0.0
    """Price of a million tokens that it writes."""

    @property
    def reads_answers(self) -> bool:
        """Whether the judge is shown the answer of a prompt."""
        return self.prompt is not None and "{answer}" in self.prompt

    @field_validator("prompt")
    @classmethod
    def _has_the_response(cls, prompt: str | None) -> str | None:
        if prompt is not None and "{response}" not in prompt:
            raise ValueError("has no {response}, so the judge would not see what it scores; add it")
        return prompt

    @model_validator(mode="after")
    def _scores_differ(self) -> Self:
        if self.highest <= self.lowest:
            raise ValueError(f"has highest {self.highest:g}, which is not above lowest {self.lowest:g}")
        return self


class ModelReward(Config):
    """A reward model: a sequence classifier of Hugging Face with one label, whose score is the reward. It reads the
    prompt's question and the response, in its own chat template where it has one, else as a pair of texts.

    With it, `workers` is 1 by default, since each has the model, and `timeout_s` is 60.
    """

    type: Literal["reward_model"] = "reward_model"
    path: PathText
    """A Hugging Face directory, or a hub id."""
    revision: str | None = None
    """Branch, tag or commit of a hub id."""
    device: Device = "cpu"
    """cpu, cuda, cuda:N, xpu, xpu:N or mps. In a separated run it is one that the reward's workers reserve."""
    dtype: DType = "float32"
    """Type of the weights and of what is computed with them."""
    batch_size: Batch = 16
    """Maximum number of responses that are scored together: those that wait when the model is free."""
    max_tokens: Count | None = None
    """Maximum number of tokens of a prompt with its response; a longer one is a failed grading. By default what the
    model can read."""
    start_limit_s: Seconds = 600.0
    """Seconds in which the model must be loaded."""

    @property
    def model(self) -> ModelConfig:
        """The model as one that is found like that of a run."""
        return ModelConfig(path=self.path, revision=self.revision)


class GivenReward(_Called):
    """A function of the program that started the run, `Trainer(recipe, reward=f)`, which writes this section. It is
    called like a function of `type: function`. Whoever starts a recipe with it runs its code."""

    type: Literal["given"] = "given"
    name: Annotated[str, Field(max_length=100)]
    """Name of the function, for people."""
    python: Annotated[str, Field(max_length=10)]
    """Version of Python that wrote the function and that it needs."""
    pickled: Annotated[str, Field(max_length=MAX_PICKLED_CHARS)]
    """The function, as dill and base64 write it. Modules are included by name alone, all else in full."""


Grader = Annotated[
    ExactReward
    | RegexReward
    | IntegerReward
    | MathReward
    | ReasoningGymReward
    | FunctionReward
    | GroupFunctionReward
    | JudgeReward
    | ModelReward
    | GivenReward,
    Field(discriminator="type"),
]


def _at_once(grader: Grader) -> int:
    """The responses that a process grades at a time. A function may take several, which it alone knows."""
    if isinstance(grader, JudgeReward):
        return grader.concurrency
    return grader.batch_size if isinstance(grader, ModelReward) else 1


def _processes(grader: Grader, places: int) -> int:
    return -(-places // _at_once(grader))


class _Grading(Config):
    """The processes of a grader, and what its gradings count."""

    workers: Processes = 2
    """Processes that grade; each can be killed without harm."""
    timeout_s: Seconds = 10.0
    """Seconds that a grading may take; a longer one is killed and counts as failed."""
    retries: Annotated[int, Field(ge=0, le=1000)] = 0
    """Number of further attempts at a response whose grading failed."""
    correct_at: Annotated[float, Field(ge=-1e6, le=1e6)] | None = None
    """A response with at least this reward counts as correct in `accuracy`. By default the grader decides: exact,
    regex, integer and math do, reasoning_gym at a score of 1, and a function by a truth value or a part `correct`."""
    failure_reward: Annotated[float, Field(ge=-1e6, le=1e6)] | None = None
    """Reward of a response whose grading failed; null leaves the sample out of its group and of the update. A step
    without a successful grading ends the run all the same."""

    @model_validator(mode="before")
    @classmethod
    def _suits_its_grader(cls, values: Any) -> Any:
        kind = key_of(key_of(values, "grader", None), "type", None)
        if kind in ("judge", "reward_model"):  # slow, and one process does the work of many
            return with_default(with_default(values, "workers", 1), "timeout_s", 60.0)
        return values


class GradingConfig(_Grading):
    """A grader and the processes that run it."""

    grader: Grader

    @property
    def sees_groups(self) -> bool:
        """Whether all responses of a group are graded together."""
        return isinstance(self.grader, GroupFunctionReward)

    @property
    def places(self) -> int:
        """The responses that its processes grade at a time."""
        return self.workers * _at_once(self.grader)

    @property
    def batch_size(self) -> int:
        """Maximum number of responses that are graded in one call though they have nothing to do with each other."""
        return self.grader.batch_size if isinstance(self.grader, ModelReward) else 1

    @property
    def start_limit_s(self) -> float:
        """Seconds in which the grader must be made. Imports on a busy machine take seconds; a module that takes longer
        hangs."""
        return self.grader.start_limit_s if isinstance(self.grader, ModelReward) else 120.0


class NamedRewardConfig(GradingConfig):
    """One of several rewards that are added up."""

    weight: Annotated[float, Field(ge=-1e6, le=1e6)] = 1.0
    """Factor of the reward in the sum."""


RewardName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,40}$")]
MAX_REWARDS = 16
"""Rewards of a run at most."""
_TAKEN_NAME = "correct"
"""The name of the verdict on a response, which stands beside the rewards by name."""


class RewardsConfig(_Grading):
    """The reward of a response: that of one `grader`, or the weighted sum of those of several `graders`."""

    grader: Grader | None = None
    """The grader, where there is one."""
    graders: Annotated[dict[RewardName, NamedRewardConfig], Field(max_length=MAX_REWARDS)] = {}
    """Several rewards by name. Each has a `grader`, a `weight` (1 by default), and the keys `workers`, `timeout_s`,
    `retries`, `correct_at` and `failure_reward` of its own. Beside them, `rewards` has `correct_at` alone, which is for
    the sum."""

    @property
    def each(self) -> Mapping[str, GradingConfig]:
        """The graders by the name of their reward; a single one has the empty name."""
        if self.grader is None:
            return self.graders
        return {"": GradingConfig.model_construct(**{name: getattr(self, name) for name in GradingConfig.model_fields})}

    @property
    def with_one_worker(self) -> Self:
        """The same with one process for each grader."""
        graders = {name: grading.model_copy(update={"workers": 1}) for name, grading in self.graders.items()}
        return self.model_copy(update={"workers": 1, "graders": graders})

    def with_places(self, least: Mapping[str, int]) -> Self:
        """The same with processes for so many responses at a time, of each reward by its name in `each`.

        Of several graders, those that take more keep theirs.
        """
        if self.grader is not None:
            return self.model_copy(update={"workers": _processes(self.grader, least[""])})
        graders = {
            name: grading.model_copy(update={"workers": max(_processes(grading.grader, least[name]), grading.workers)})
            for name, grading in self.graders.items()
        }
        return self.model_copy(update={"graders": graders})

    @field_validator("graders")
    @classmethod
    def _names_are_free(cls, graders: dict[str, NamedRewardConfig]) -> dict[str, NamedRewardConfig]:
        if _TAKEN_NAME in graders:
            raise ValueError(
                f"has a reward named {_TAKEN_NAME!r}, which the verdict on a response is called; rename it"
            )
        return graders

    @model_validator(mode="after")
    def _one_or_several(self) -> Self:
        if self.grader is None and not self.graders:
            raise ValueError("has no grader; give grader, or several rewards in graders")
        if self.grader is not None and self.graders:
            raise ValueError("has both grader and graders; leave one out (grader=null, graders={})")
        for name, field in _Grading.model_fields.items() if self.graders else ():
            if name != "correct_at" and getattr(self, name) != field.default:
                first = next(iter(self.graders))
                raise ValueError(
                    f"has {name} {getattr(self, name)!r} beside graders, and each of these has its own; "
                    f"give graders.{first}.{name}"
                )
        return self


def grader_key(name: str) -> str:
    """Return the key of a reward's grader in a recipe. `name`: see `RewardsConfig.each`."""
    return f"rewards.graders.{name}.grader" if name else "rewards.grader"
