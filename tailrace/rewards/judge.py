"""Rewards by a judge: a language model behind an endpoint with OpenAI's API.

    request ──prompt──▶ POST …/chat/completions ──answer──▶ score ──▶ reward
                 ▲                │ not reached, busy, error of its own: JudgeUnavailable after the last attempt
                 └── back-off ◀───┘ refused: JudgeRefused; no score within its bounds: JudgeNonsense

Waiting: a request has no time limit of its own; that of its grading ends it, with all its attempts and waits.
"""

import asyncio
import random
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import httpx
import msgspec

from tailrace.config.patterns import find
from tailrace.errors import UNREADABLE, ConfigError, JudgeNonsense, JudgeRefused, JudgeUnavailable, one_line, quoted
from tailrace.rewards.base import AsyncGrader, GradingRequest, expected_text, question_text
from tailrace.rewards.spending import spend

if TYPE_CHECKING:
    from tailrace.config.rewards import JudgeReward

_PROMPT = """\
You judge a response to a request. The request:

{question}

The response:

{response}

How good is the response? Give your reasons in at most three sentences. Then write a last line `Score: N`, where N is \
a number from {lowest} (useless) to {highest} (perfect)."""
_MAX_BYTES = 4 * 2**20
"""The largest body of an answer that is read."""
_MAX_WAIT_S, _MAX_ASKED_WAIT_S = 30.0, 60.0
"""The longest wait before a further attempt, and the longest that an endpoint may ask for."""
_SHOWN = 200
"""Characters of an answer in an error."""
_PASSING = {408, 409, 425, 429}
"""The statuses of errors that may pass, with all from 500 on."""
_PLACEHOLDER = re.compile(r"\{(question|response|answer|lowest|highest)\}")
_Tokens = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _Message
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: _Tokens = 0
    completion_tokens: _Tokens = 0


class _Answer(msgspec.Struct):
    """What an endpoint says; further keys do not matter."""

    choices: list[_Choice] = []
    usage: _Usage | None = None


class _Passing(Exception):
    """A failure that may pass."""

    def __init__(self, what: str, wait_s: float | None = None) -> None:
        """`wait_s`: the wait that the endpoint asks for."""
        super().__init__(what)
        self.wait_s = wait_s


class JudgeGrader(AsyncGrader):
    """Asks a judge for a score of each response, and makes it a reward from 0 to 1."""

    def __init__(self, config: "JudgeReward", key: str) -> None:
        """`key`: that of the grader in the recipe.

        Raises:
            ConfigError: the URL is none.
        """
        try:
            self._url = httpx.URL(f"{config.url}/chat/completions")
        except (httpx.InvalidURL, ValueError) as error:
            raise ConfigError(f"{key}.url {config.url!r} is no URL: {one_line(error)}; give one that is") from None
        self.concurrency = config.concurrency
        self._config = config
        self._prompt = config.prompt or _PROMPT
        self._pattern = re.compile(config.score)
        headers = {} if config.api_key is None else {"Authorization": f"Bearer {config.api_key}"}
        self._client = httpx.AsyncClient(
            headers=headers, timeout=None, limits=httpx.Limits(max_connections=config.concurrency)
        )

    async def grade(self, request: GradingRequest) -> float:
        """Ask for a score. Its attempts and tokens are counted as spent.

        Raises:
            JudgeUnavailable, JudgeRefused, JudgeNonsense: see there.
            RewardError: the judge is to see the answer, and the prompt has none.
        """
        body, attempt = self._body(request), 1
        while True:
            try:
                return self._score(await self._ask(body))
            except _Passing as failure:
                if attempt > self._config.max_retries:
                    raise JudgeUnavailable(f"{failure}; attempts: {attempt}") from None
                wait_s = failure.wait_s
            await asyncio.sleep(self._wait_s(attempt) if wait_s is None else wait_s)
            attempt += 1

    async def close(self) -> None:
        """Close its connections."""
        await self._client.aclose()

    def _body(self, request: GradingRequest) -> dict[str, Any]:
        values = {
            "question": question_text(request),
            "response": request.response,
            "answer": expected_text(request) if "{answer}" in self._prompt else "",
            "lowest": f"{self._config.lowest:g}",
            "highest": f"{self._config.highest:g}",
        }
        asked = _PLACEHOLDER.sub(lambda match: values[match[1]], self._prompt)
        system = self._config.system_prompt
        messages = [] if system is None else [{"role": "system", "content": system}]
        body = {"model": self._config.model, "messages": [*messages, {"role": "user", "content": asked}]}
        bounds = {"max_tokens": self._config.max_tokens, "temperature": self._config.temperature}
        return {**body, **{key: value for key, value in bounds.items() if value is not None}, **self._config.options}

    async def _ask(self, body: Mapping[str, Any]) -> str:
        """Make one attempt, and return the judge's text."""
        spend({"requests": 1})
        try:
            async with self._client.stream("POST", self._url, json=body) as response:
                content = await _read(response)
        except httpx.RequestError as error:
            raise _Passing(f"{self._config.url} cannot be reached: {type(error).__name__} {one_line(error)}") from None
        if response.status_code != httpx.codes.OK:
            said = f"HTTP {response.status_code} of {self._config.url}: {self._shown(content)}"
            if response.status_code in _PASSING or response.status_code >= 500:
                raise _Passing(said, _asked_wait_s(response))
            raise JudgeRefused(said)
        if len(content) > _MAX_BYTES:
            raise JudgeNonsense(f"its answer has more than {_MAX_BYTES} bytes")
        return self._text_of(content)

    def _text_of(self, content: bytes) -> str:
        try:
            answer = msgspec.json.decode(content, type=_Answer)
        except UNREADABLE as error:
            raise JudgeNonsense(f"its answer cannot be read ({one_line(error)}): {self._shown(content)}") from None
        if (usage := answer.usage) is not None:
            read, written = usage.prompt_tokens, usage.completion_tokens
            cost = (read * self._config.prompt_price + written * self._config.completion_price) / 1e6
            spend({"prompt_tokens": read, "completion_tokens": written, "cost": cost})
        choice = answer.choices[0] if answer.choices else None
        if choice is not None and choice.finish_reason == "length":  # its last number may be half of the score
            raise JudgeNonsense("its answer was cut off; raise max_tokens of the judge, or ask for a shorter answer")
        if choice is None or not choice.message.content:
            raise JudgeNonsense(f"its answer has no text: {self._shown(content)}")
        return choice.message.content

    def _score(self, text: str) -> float:
        lowest, highest = self._config.lowest, self._config.highest
        found = find(self._pattern, text, "last")
        try:
            score = float(found or "")
        except ValueError:
            raise JudgeNonsense(f"its answer has no score: {quoted(text[-_SHOWN:], _SHOWN)}") from None
        if not lowest <= score <= highest:  # NaN fails this, too
            raise JudgeNonsense(f"its score is {score:g}, and has to be from {lowest:g} to {highest:g}")
        return (score - lowest) / (highest - lowest)

    def _wait_s(self, attempt: int) -> float:
        """Seconds after an attempt that has failed. Gradings that failed together do not return together."""
        longest = min(_MAX_WAIT_S, self._config.backoff_s * 2.0 ** (attempt - 1))
        return longest * random.uniform(0.5, 1.0)

    def _shown(self, content: bytes) -> str:
        text = content.decode(errors="replace")
        return quoted(text.replace(self._config.api_key, "***") if self._config.api_key else text, _SHOWN)


async def _read(response: httpx.Response) -> bytes:
    """The body, or the beginning of one that is too large."""
    content = b""
    async for chunk in response.aiter_bytes():
        content += chunk
        if len(content) > _MAX_BYTES:
            break
    return content


def _asked_wait_s(response: httpx.Response) -> float | None:
    """The seconds that an endpoint asks to wait; None where it does not, or gives a date."""
    asked = response.headers.get("retry-after", "")
    return min(float(asked), _MAX_ASKED_WAIT_S) if re.fullmatch(r"\d{1,9}(\.\d{1,9})?", asked) else None
