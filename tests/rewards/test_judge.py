"""Judges behind a real socket: what they are asked, how their scores become rewards, and every way to fail."""

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from itertools import chain, repeat
from typing import Any

import psutil
import pytest

from tailrace.config.load import load_config
from tailrace.config.rewards import GradingConfig, JudgeReward, NamedRewardConfig, RewardsConfig
from tailrace.config.written import shown
from tailrace.errors import ConfigError, JudgeNonsense, JudgeRefused, JudgeUnavailable, RewardError
from tailrace.rewards.graders import Graders
from tailrace.rewards.judge import JudgeGrader
from tailrace.rewards.pool import GraderPool, capacity_of
from tailrace.rewards.spending import begin_grading
from tests.conftest import TinyModel
from tests.helpers.judge_server import JudgeServer, Reply, failed, said
from tests.rewards.requests import make_request
from tests.rollout.test_http import TOKEN, served


def in_turn(*replies: Reply | None) -> Callable[[Any], Reply | None]:
    """Give these replies one after the other, the last one again and again."""
    turns = chain(replies, repeat(replies[-1]))
    return lambda _: next(turns)


@asynccontextmanager
async def judging(judge: JudgeServer, **fields: Any) -> AsyncIterator[JudgeGrader]:
    config = JudgeReward(**{"url": judge.url, "model": "judge", "backoff_s": 0.001, **fields})
    grader = JudgeGrader(config, "rewards.grader")
    try:
        yield grader
    finally:
        await grader.close()


async def test_a_judge_sees_request_and_response_and_its_score_becomes_a_reward_from_0_to_1() -> None:
    with JudgeServer(lambda _: said("Fine.\n**Score:** 7.5")) as judge:
        async with judging(judge, api_key="k-1", system_prompt="Be fair.", options={"seed": 3}) as grader:
            begin_grading((spent := Counter[str]()).update)
            reward = await grader.grade(make_request("{question} 4", question="2 + 2?"))
    assert reward == 0.75
    ((path, headers, body),) = judge.asked
    assert path == "/v1/chat/completions"
    assert headers["authorization"] == "Bearer k-1"
    system, asked = body.pop("messages")
    assert body == {"model": "judge", "max_tokens": 512, "temperature": 0.0, "seed": 3}
    assert system == {"role": "system", "content": "Be fair."}
    assert "The request:\n\n2 + 2?\n" in asked["content"]
    assert "from 0 (useless) to 10 (perfect)" in asked["content"]
    assert "The response:\n\n{question} 4\n" in asked["content"], "what stands in a response is not filled in"
    assert dict(spent) == {"requests": 1, "prompt_tokens": 100, "completion_tokens": 10, "cost": 0}


@pytest.mark.parametrize(
    ("text", "reward"),
    [("score: 10.", 1.0), ("**Score:** 7.25/10", 0.725), ("Score = .5", 0.05), ("Score: 1\nScore: 2", 0.2)],
)
async def test_a_score_is_read_as_judges_write_it(text: str, reward: float) -> None:
    with JudgeServer(lambda _: said(text)) as judge:
        async with judging(judge) as grader:
            assert await grader.grade(make_request("x")) == pytest.approx(reward)


async def test_a_recipe_says_what_is_asked_and_what_counts() -> None:
    with JudgeServer(lambda _: said("grade 1, or rather grade -3")) as judge:
        fields = {
            "prompt": "{answer} or {response}? {lowest} to {highest}",
            "score": r"grade (-?\d)",
            "lowest": -5,
            "highest": 5,
        }
        bounds: dict[str, Any] = {"max_tokens": None, "temperature": None}
        async with judging(judge, **fields, **bounds) as grader:
            assert await grader.grade(make_request("x", answer=7)) == 0.2
            with pytest.raises(RewardError, match="the prompt has no answer to compare with"):
                await grader.grade(make_request("x"))
    ((_, headers, body),) = judge.asked
    assert "authorization" not in headers
    assert body == {"model": "judge", "messages": [{"role": "user", "content": "7 or x? -5 to 5"}]}


async def test_a_conversation_is_shown_by_roles() -> None:
    with JudgeServer(lambda _: said("Score: 0")) as judge:
        async with judging(judge, prompt="{question}|{response}") as grader:
            question = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
            assert await grader.grade(make_request("r", question=question)) == 0.0
    assert judge.asked[0][2]["messages"][0]["content"] == "system: s\n\nuser: u|r"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("I cannot say.", "its answer has no score: 'I cannot say.'"),
        ("", "its answer has no text"),
        (None, "its answer has no text"),
        ("Score (0-10): 7", "its answer has no score: 'Score (0-10): 7'"),
        ("Score: 11", "its score is 11, and has to be from 0 to 10"),
        ("Score: -1", "its score is -1, and has to be from 0 to 10"),
        ("Score: " + "9" * 400, "its score is inf, and has to be from 0 to 10"),
    ],
)
async def test_an_answer_without_a_score_is_nonsense_and_its_tokens_count(text: str | None, says: str) -> None:
    with JudgeServer(lambda _: said(text)) as judge:
        async with judging(judge) as grader:
            begin_grading((spent := Counter[str]()).update)
            with pytest.raises(JudgeNonsense) as caught:
                await grader.grade(make_request("x"))
    assert str(caught.value).startswith(says)
    assert spent["completion_tokens"] == 10
    assert len(judge.asked) == 1, "the same would come again"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"<html>", "its answer cannot be read ("),
        (b"", "its answer cannot be read ("),
        (b"\xff\xfe", "its answer cannot be read ("),
        (b"[]", "its answer cannot be read ("),
        (b"{}", "its answer has no text: '{}'"),
        (b'{"choices": []}', "its answer has no text"),
        (b'{"choices": [{"message": {"content": 5}}]}', "its answer cannot be read ("),
        (b'{"usage": {"prompt_tokens": -1}}', "its answer cannot be read ("),
        (
            b'{"choices": [{"message": {"content": "Score: 1"}, "finish_reason": "length"}]}',
            "its answer was cut off; ra",
        ),
        (b'{"choices": "' + b"x" * 5_000_000 + b'"}', "its answer has more than 4194304 bytes"),
        (b"[" * 100_000, "its answer cannot be read ("),
    ],
)
async def test_a_body_that_is_no_answer_is_nonsense_of_bounded_length(body: bytes, says: str) -> None:
    with JudgeServer(lambda _: (200, body, {})) as judge:
        async with judging(judge) as grader:
            with pytest.raises(JudgeNonsense) as caught:
                await grader.grade(make_request("x"))
    assert str(caught.value).startswith(says)
    assert len(str(caught.value)) < 500


async def test_failures_that_may_pass_are_tried_again_and_each_attempt_counts() -> None:
    long_page: Reply = 502, b"x" * 5_000_000, {}
    replies = [failed(429), long_page, None, failed(500, retry_after="0"), failed(429, retry_after="0.001")]
    with JudgeServer(in_turn(*replies, said("Score: 5"))) as judge:
        async with judging(judge) as grader:
            begin_grading((spent := Counter[str]()).update)
            assert await grader.grade(make_request("x")) == 0.5
    assert spent["requests"] == len(judge.asked) == 6
    assert spent["prompt_tokens"] == 100


async def test_a_judge_that_stays_away_is_unavailable_after_the_last_attempt() -> None:
    with JudgeServer(lambda _: failed(503)) as judge:
        async with judging(judge, max_retries=2) as grader:
            with pytest.raises(JudgeUnavailable, match=r"HTTP 503 of http.*status 503.*; attempts: 3$"):
                await grader.grade(make_request("x"))
        assert len(judge.asked) == 3
    async with judging(judge, max_retries=1) as grader:  # nobody listens there any more
        with pytest.raises(JudgeUnavailable, match=r"http\S+/v1 cannot be reached: ConnectError .*; attempts: 2$"):
            await grader.grade(make_request("x"))


@pytest.mark.parametrize("status", [301, 400, 401, 403, 404, 422])
async def test_a_judge_that_refuses_is_not_asked_again_and_no_error_has_the_key(status: int) -> None:
    with JudgeServer(lambda _: (status, b"bad key k-123", {"location": "/elsewhere"})) as judge:
        async with judging(judge, api_key="k-123") as grader:
            with pytest.raises(JudgeRefused) as caught:
                await grader.grade(make_request("x"))
    assert str(caught.value) == f"HTTP {status} of {judge.url}: 'bad key ***'"
    assert len(judge.asked) == 1


@pytest.fixture
def held() -> Iterator[threading.Event]:
    """Set at the end of the test: what waits for it goes on then."""
    event = threading.Event()
    yield event
    event.set()


async def test_a_judge_that_never_answers_is_a_timeout(held: threading.Event) -> None:
    def reply(body: dict[str, Any]) -> Reply:
        if "never" in body["messages"][0]["content"]:
            held.wait(60)
        return said("Score: 10")

    with JudgeServer(reply) as judge:
        grader = JudgeReward(url=judge.url, model="judge")
        config = NamedRewardConfig(grader=grader, timeout_s=1.0)
        async with Graders(RewardsConfig(graders={"judge": config})) as graders:
            late, fine = await asyncio.gather(*map(graders.grade, map(make_request, ("never", "now"))))
        held.set()
    assert late.error == "judge.timeout: grading took longer than 1 s"
    assert dict(late.spent) == {"judge.requests": 1}
    assert fine.reward == 1.0


async def test_what_a_judge_cost_before_its_process_died_is_counted(held: threading.Event) -> None:
    asked = threading.Event()

    def reply(body: dict[str, Any]) -> Reply:
        if len(judge.asked) == 1:
            return said("no score")
        asked.set()
        held.wait(60)
        return said("Score: 10")

    with JudgeServer(reply) as judge:
        config = GradingConfig(grader=JudgeReward(url=judge.url, model="judge"), retries=1)
        async with GraderPool(config) as pool:
            grading = asyncio.create_task(pool.grade(make_request("x")))
            assert await asyncio.to_thread(asked.wait, 60)
            (guard,) = [child for child in psutil.Process().children() if "tailrace.rewards.serve" in child.cmdline()]
            guard.children()[0].kill()
            grade = await grading
        held.set()
    assert (grade.error or "").startswith("died: SIGKILL")
    assert dict(grade.spent) == {"requests": 2, "prompt_tokens": 100, "completion_tokens": 10, "cost": 0}


async def test_no_more_requests_are_made_at_a_time_than_the_recipe_says_and_all_are_counted() -> None:
    together = threading.Barrier(3)

    def reply(body: dict[str, Any]) -> Reply:
        together.wait(30)
        return said("Score: 5" if "fine" in body["messages"][0]["content"] else "hm")

    with JudgeServer(reply) as judge:
        grader = JudgeReward(url=judge.url, model="judge", concurrency=3, prompt_price=2.0, completion_price=10.0)
        config = RewardsConfig(grader=grader, retries=1)
        assert (config.workers, config.timeout_s, await capacity_of(config)) == (1, 60.0, 3)
        async with GraderPool(config.each[""]) as pool:
            grades = await asyncio.gather(*(pool.grade(make_request("fine")) for _ in range(6)))
            bad = await asyncio.gather(*(pool.grade(make_request("bad")) for _ in range(3)))
    assert judge.most == 3
    assert [grade.reward for grade in grades] == [0.5] * 6
    assert grades[0].spent == {"requests": 1, "prompt_tokens": 100, "completion_tokens": 10, "cost": 0.0003}
    assert bad[0].spent["requests"] == 2, "the second attempt of the recipe is paid for, too"
    assert bad[0].error == "JudgeNonsense: its answer has no score: 'hm'"


async def test_tailrace_serve_can_be_a_judge(tiny_model: TinyModel) -> None:
    async with served(tiny_model("llama")) as server:
        grader = JudgeReward(url=f"{server.url}/v1", model="tiny", api_key=TOKEN, max_tokens=4, score="^(5?)")
        async with GraderPool(GradingConfig(grader=grader)) as pool:
            grade = await pool.grade(make_request("x", question="q"))
    assert (grade.error or "").startswith("JudgeNonsense: its answer was cut off"), "a random model does not end"
    assert (grade.spent["requests"], grade.spent["completion_tokens"]) == (1, 4)


BASE = {"output_dir": "o", "prompts": {"source": {"type": "jsonl", "path": "p.jsonl"}}}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ("url: localhost:8000", "rewards.grader.url is 'localhost:8000'; expected the base URL of an OpenAI-compat"),
        ("url: 'http://h/v1/chat/completions'", "rewards.grader.url is 'http://h/v1/chat/completions'; expected the"),
        ("url: 'http://h:99999/v1'", "rewards.grader.url is 'http://h:99999/v1'; expected the base URL"),
        ("url: 'http://[::1/v1'", r"rewards.grader.url is 'http://\[::1/v1'; expected the base URL"),
        ("url: 'http://h/v1?key=1'", r"rewards.grader.url is .*, without user, query and fragment"),
        ("url: 'http://me:secret@h/v1'", r"rewards.grader.url is 'http://\*\*\*@h/v1'; expected the base URL"),
        ("prompt: 'rate {answer}'", r"rewards.grader.prompt has no \{response\}, so the judge would not see"),
        ("score: '('", "rewards.grader.score is not a regular expression"),
        ("lowest: 10", "has highest 10, which is not above lowest 10"),
        ("highest: .inf", "rewards.grader.highest is .inf"),
        ("prompt_price: -1", "rewards.grader.prompt_price is -1"),
        ("concurrency: 0", "rewards.grader.concurrency is 0"),
        ("api_key: 'a b'", "rewards.grader.api_key is empty, or has white space or other"),
        ("api_key: '${oc.env:NO_SUCH_KEY}'", "rewards.grader.api_key cannot be .* 'NO_SUCH_KEY' not found"),
        ("api_key: '${oc.env:NO_SUCH_KEY,\"\"}'", "rewards.grader.api_key is empty, or has"),
        ("type: [judge]", r"rewards.grader.type is .*; expected one of 'exact'"),
        ("options: {x: .nan}", "rewards.grader.options has .nan at x"),
    ],
)
def test_a_judge_that_cannot_be_asked_is_refused_in_one_line(fields: str, says: str) -> None:
    judge = "{type: judge, url: 'http://localhost:8000/v1', model: m}"
    with pytest.raises(ConfigError, match=says):
        load_config(BASE, [f"rewards.grader={judge}", f"rewards.grader={{{fields}}}"])


async def test_a_judge_at_no_possible_host_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"rewards\.grader\.url 'http://256\.0\.0\.1/v1' is no URL: Invalid IPv4"):
        JudgeGrader(JudgeReward(url="http://256.0.0.1/v1", model="judge"), "rewards.grader")


def test_the_key_of_a_judge_is_not_shown() -> None:
    judge = {"type": "judge", "url": "http://localhost:8000/v1/", "model": "m", "api_key": "sk-1"}
    config = load_config({**BASE, "rewards": {"grader": judge}})
    assert shown(config)["rewards"]["grader"]["api_key"] == "***"
    assert shown(config)["rewards"]["grader"]["url"] == "http://localhost:8000/v1"
