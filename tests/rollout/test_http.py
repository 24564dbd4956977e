"""OpenAI's API in front of the service: the same tokens as the engine's own, and an answer to whatever is sent."""

import asyncio
import json
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.activity import Activity
from tailrace.config.engine import NativeEngineConfig, SamplingConfig
from tailrace.engine.base import Engine
from tailrace.engine.opening import open_engine
from tailrace.errors import UserError
from tailrace.events import EventLog
from tailrace.models.tokenizer import ResponseText, load_tokenizer
from tailrace.rollout.base import EngineFacts
from tailrace.rollout.http.app import Endpoint, Limits
from tailrace.rollout.http.asked import Reader, Refusal
from tailrace.rollout.http.server import bound, listening
from tailrace.rollout.http.text import TextStream
from tailrace.rollout.local import LocalPort
from tailrace.rollout.service import GenerationService
from tailrace.run.endpoint import make_reader
from tailrace.types import Request
from tests.conftest import TinyModel

TOKEN = "secret"
CHAT = [{"role": "user", "content": "a"}]
IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}]
OWN = {"chat_template": "{{ messages }}"}
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"


class Served:
    """A server in this event loop."""

    def __init__(self, url: str, endpoint: Endpoint, engine: Engine, reader: Reader) -> None:
        self.url = url
        self.endpoint = endpoint
        self.engine = engine
        self.reader = reader
        self.client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=TOKEN, max_retries=0)

    async def post(self, route: str, body: bytes | Any, *, token: str = TOKEN) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with httpx.AsyncClient() as client:
            headers = {"authorization": f"Bearer {token}"}
            return await client.post(f"{self.url}{route}", content=content, headers=headers, timeout=30)


@asynccontextmanager
async def served(model: Path, *, newest: int = 0, **limits: Any) -> AsyncIterator[Served]:
    """Serve a tiny model under the name `tiny`."""
    async with AsyncExitStack() as stack:
        thread = stack.enter_context(ThreadPoolExecutor(1))
        config = NativeEngineConfig(dtype="float32", kv_cache_gib=0.01)
        engine = await open_engine(config, model, device="cpu", executor=thread)
        stack.push_async_callback(engine.close)
        log = EventLog(sinks=())
        port = LocalPort(engine, EngineFacts(continues=True), log=log, activity=Activity(log, "engine"))
        service = GenerationService([port])
        tokenizer = load_tokenizer(model)
        tokenizer.chat_template = TEMPLATE
        reader = make_reader(model, tokenizer, name="tiny")
        decode = ResponseText(tokenizer, model, SamplingConfig())
        endpoint = Endpoint(service, reader, decode, token=TOKEN, limits=Limits(**limits), newest=lambda: newest)
        serving = asyncio.create_task(service.run())
        async with listening(endpoint, bound("127.0.0.1", 0)) as url:
            made = Served(url, endpoint, engine, reader)
            yield made
            await made.client.close()
        serving.cancel()
        await asyncio.wait([serving])


async def direct(engine: Engine, prompt: list[int], seed: int, **sampling: Any) -> tuple[list[int], list[float]]:
    """What the engine itself makes."""
    config = SamplingConfig(**sampling)
    request = Request(request_id=10**6, group_id=10**6, prompt_ids=np.array(prompt), sampling=config, seed=seed)
    sample = await anext(engine.submit([request]))
    return sample.response_ids.tolist(), sample.rollout_log_probs.tolist()


async def test_a_completion_has_the_tokens_of_the_engine(tiny_model: TinyModel) -> None:
    async with served(tiny_model("llama")) as server:
        prompt = server.reader.encode("hello world")
        extra = {"return_token_ids": True}
        answer = await server.client.completions.create(
            model="tiny", prompt="hello world", max_tokens=9, seed=3, n=2, logprobs=1, extra_body=extra
        )
        for number, choice in enumerate(answer.choices):
            tokens, log_probs = await direct(server.engine, prompt, 3 + number, max_new_tokens=9)
            assert choice.index == number
            assert choice.model_extra is not None
            assert choice.model_extra["token_ids"] == tokens
            assert choice.logprobs is not None
            assert choice.logprobs.token_logprobs == pytest.approx(log_probs)
        assert answer.usage is not None
        made = sum(len(choice.model_extra["token_ids"]) for choice in answer.choices if choice.model_extra)
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), made)
        again = await server.client.completions.create(model="tiny", prompt=prompt, max_tokens=9, seed=3)
        assert again.choices[0].text == answer.choices[0].text, "tokens of the prompt do as well"


async def test_the_chunks_of_a_stream_are_the_whole_answer(tiny_model: TinyModel) -> None:
    async with served(tiny_model("llama")) as server:
        asked: dict[str, Any] = {"model": "tiny", "prompt": "abc", "max_tokens": 40, "seed": 1, "n": 3}
        whole = await server.client.completions.create(**asked)
        texts, ends = [""] * 3, [""] * 3
        usage = None
        stream = await server.client.completions.create(**asked, stream=True, stream_options={"include_usage": True})
        chunks = 0
        async for chunk in stream:
            chunks += 1
            usage = chunk.usage or usage
            for choice in chunk.choices:
                texts[choice.index] += choice.text
                ends[choice.index] = choice.finish_reason or ends[choice.index]
        assert texts == [choice.text for choice in whole.choices]
        assert ends == [choice.finish_reason for choice in whole.choices]
        assert usage == whole.usage
        assert chunks > 10


async def test_the_places_of_tokens_go_on_from_chunk_to_chunk(tiny_model: TinyModel) -> None:
    async with served(tiny_model("llama")) as server:
        asked: dict[str, Any] = {"model": "tiny", "prompt": "abc", "max_tokens": 20, "seed": 1, "n": 2, "logprobs": 1}
        whole = await server.client.completions.create(**asked)
        offsets: list[list[int]] = [[], []]
        async for chunk in await server.client.completions.create(**asked, stream=True):
            for choice in chunk.choices:
                assert choice.logprobs is not None
                offsets[choice.index] += choice.logprobs.text_offset or []
        assert offsets == [choice.logprobs.text_offset for choice in whole.choices if choice.logprobs is not None]
        assert offsets[0][-1] > 0


async def test_a_chat_goes_through_the_template_and_has_log_probabilities(tiny_model: TinyModel) -> None:
    async with served(tiny_model("llama")) as server:
        prompt = server.reader.encode("user: hi\n")
        answer = await server.client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hi"}], max_tokens=5, seed=2, logprobs=True
        )
        _, log_probs = await direct(server.engine, prompt, 2, max_new_tokens=5)
        assert answer.choices[0].logprobs is not None
        assert [part.logprob for part in answer.choices[0].logprobs.content or []] == pytest.approx(log_probs)
        stream = await server.client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hi"}], max_tokens=5, seed=2, stream=True
        )
        text = ""
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
        assert text == answer.choices[0].message.content


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_ends_its_request(tiny_model: TinyModel, stream: bool) -> None:
    async with served(tiny_model("llama")) as server:
        await server.engine.pause_generation()
        body = {"model": "tiny", "prompt": "abc", "max_tokens": 200, "ignore_eos": True, "stream": stream}
        asking = asyncio.create_task(server.post("/v1/completions", body))
        async with asyncio.timeout(20):
            while server.engine.stats().waiting == 0:
                await asyncio.sleep(0.01)
            asking.cancel()
            await asyncio.wait([asking])
            while server.engine.stats().waiting:
                await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("route", "body", "status", "said"),
    [
        ("completions", b"{", 400, "the body cannot be read"),
        (
            "completions",
            {"model": "tiny", "prompt": "a", "ignore_eos": True, "stop": ["x"]},
            400,
            "ignore_eos lets nothing end a response but its length; leave it or stop out",
        ),
        ("completions", b"\xff", 400, "the body cannot be read"),
        ("completions", {"model": "tiny"}, 400, "missing required field `prompt`"),
        ("completions", {"model": "other", "prompt": "a"}, 404, "the model 'other' is not served; 'tiny' is"),
        ("completions", {"model": "tiny", "prompt": ""}, 400, "prompt is empty"),
        ("completions", {"model": "tiny", "prompt": []}, 400, "prompt is empty"),
        ("completions", {"model": "tiny", "prompt": [1, "a"]}, 400, "prompt is neither text nor tokens from 0 to"),
        ("completions", {"model": "tiny", "prompt": [10**9]}, 400, "prompt is neither text nor tokens from 0 to"),
        ("completions", {"model": "tiny", "prompt": [5] * 10**5}, 400, "and the context of"),
        (
            "completions",
            {"model": "tiny", "prompt": [5] * 3, "max_tokens": 10**6},
            400,
            "max_tokens is 1000000, and the prompt's 3 tokens leave room for ",
        ),
        (
            "chat/completions",
            {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 10**6},
            400,
            "max_completion_tokens is 1000000, and the prompt's",
        ),
        ("completions", {"model": "tiny", "prompt": "a", "n": 0}, 400, "n is 0; give 1 to 128"),
        (
            "completions",
            {"model": "tiny", "prompt": "a", "temperature": -1},
            400,
            "temperature is -1.0: input should be",
        ),
        ("completions", {"model": "tiny", "prompt": "a", "max_tokens": -1}, 400, "max_tokens is -1: input should be"),
        ("completions", {"model": "tiny", "prompt": "a", "max_tokens": 0}, 400, "max_tokens is 0: input should be"),
        ("completions", {"model": "tiny", "prompt": "a", "n": "1"}, 400, "n: expected `int`, got `str`"),
        ("completions", {"model": "tiny", "prompt": "a", "stop": [1]}, 400, "stop[0]: expected `str`, got `int`"),
        ("completions", {"model": "tiny", "prompt": "a", "stop": [""]}, 400, "stop has an empty string"),
        ("completions", {"model": "tiny", "prompt": "a", "seed": 2**63}, 400, "seed is 9223372036854775808; give -"),
        ("completions", {"model": "tiny", "prompt": "a", "stream_options": {}}, 400, "stream_options is for streams"),
        ("completions", {"model": "tiny", "prompt": "a", "temprature": 1}, 400, "did you mean 'temperature'?"),
        ("completions", {"model": "tiny", "prompt": "a", "logit_bias": {"5": 1}}, 400, "leave it out, or give {}"),
        ("completions", {"model": "tiny", "prompt": "a", "best_of": 2}, 400, "best_of is not supported"),
        ("completions", {"model": "tiny", "prompt": "a", "echo": True}, 400, "echo is not supported"),
        ("completions", {"model": "tiny", "prompt": "a", "weight_version": 3}, 409, "the newest are of version 0"),
        ("chat/completions", {"model": "tiny", "messages": []}, 400, "messages is empty"),
        ("chat/completions", {"model": "tiny", "messages": [{}], "top_logprobs": 3}, 400, "top_logprobs is not"),
        (
            "chat/completions",
            {"model": "tiny", "messages": CHAT, "max_completion_tokens": 0},
            400,
            "_tokens is 0: input",
        ),
        ("chat/completions", {"model": "tiny", "messages": IMAGE}, 400, "only text is served"),
        (
            "chat/completions",
            {"model": "tiny", "messages": CHAT, "chat_template_kwargs": OWN},
            400,
            "has chat_template,",
        ),
        ("embeddings", {}, 404, "is no route"),
    ],
)
async def test_a_request_that_cannot_be_served_is_told_why(
    http: Served, route: str, body: Any, status: int, said: str
) -> None:
    answer = await http.post(f"/v1/{route}", body)
    assert answer.status_code == status, answer.text
    assert said in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "more",
    [
        dict.fromkeys(
            ("n", "temperature", "top_p", "stop", "stream", "seed", "max_tokens", "logprobs", "stream_options")
        ),
        {
            "echo": False,
            "best_of": 1,
            "suffix": None,
            "logit_bias": {},
            "presence_penalty": 0,
            "frequency_penalty": 0.0,
        },
    ],
)
async def test_a_field_that_changes_nothing_is_taken(http: Served, more: Any) -> None:
    answer = await http.post("/v1/completions", {"model": "tiny", "prompt": "a", "max_tokens": 2, **more})
    assert answer.status_code == 200, answer.text


async def test_parts_of_text_are_the_lines_of_a_message(http: Served) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": text} for text in ("hello", "world")]}]
    whole = [{"role": "user", "content": "hello\nworld"}]
    asked = [http.reader.chatted(json.dumps({"model": "tiny", "messages": one}).encode()) for one in (parts, whole)]
    assert asked[0].prompts[0].tolist() == asked[1].prompts[0].tolist()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_server_that_ends_tells_those_who_wait(http: Served, stream: bool) -> None:
    await http.engine.pause_generation()
    body = {"model": "tiny", "prompt": "abc", "stream": stream}
    asking = asyncio.create_task(http.post("/v1/completions", body))
    async with asyncio.timeout(20):
        while http.engine.stats().waiting == 0:
            await asyncio.sleep(0.01)
        http.endpoint.end()
        answer = await asking
        late = await http.post("/v1/completions", body)
    assert answer.status_code == (200 if stream else 503)
    for one in (answer, late):
        assert "the server ends" in one.text
        assert '"type":"server_error"' in one.text


async def test_an_answer_does_not_wait_until_its_engine_has_dropped_it(tiny_model: TinyModel) -> None:
    async with served(tiny_model("llama"), limit_s=0.2) as server:
        dropped = asyncio.Event()

        async def drop(request_ids: Any) -> None:
            await dropped.wait()

        server.engine.abort = drop  # type: ignore[method-assign]  # in a long step
        await server.engine.pause_generation()
        async with asyncio.timeout(20):
            assert (await server.post("/v1/completions", {"model": "tiny", "prompt": "a"})).status_code == 504
        dropped.set()


async def test_one_model_is_described_by_its_name(http: Served) -> None:
    assert (await http.client.models.retrieve("tiny")).id == "tiny"
    with pytest.raises(openai.NotFoundError, match="the model 'other' is not served; 'tiny' is"):
        await http.client.models.retrieve("other")


def test_a_port_that_cannot_be_had_is_named_with_its_option() -> None:
    with bound("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port} of 127.0.0.1 cannot be had: Address already in use.* --port"):
            bound("127.0.0.1", port)
    with pytest.raises(UserError, match=r"choose another rollout\.http\.host"):
        bound("a" * 100, 0, keys=("rollout.http.host", "rollout.http.port"))


@pytest.fixture
async def http(tiny_model: TinyModel) -> AsyncIterator[Served]:
    async with served(tiny_model("llama")) as server:
        yield server


async def test_a_wrong_token_is_refused_and_health_needs_none(http: Served) -> None:
    for route in ("/v1/completions", "/v1/chat/completions"):
        answer = await http.post(route, {"model": "tiny", "prompt": "a"}, token="wrong")
        assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
    async with httpx.AsyncClient() as client:
        for route, status in (("/health", 200), ("/v1/models", 401), ("/metrics", 401), ("/v1/completions", 405)):
            answer = await client.get(f"{http.url}{route}")
            assert (answer.status_code, answer.headers.get("allow")) == (status, "POST" if status == 405 else None)
        headers = {"authorization": f"Bearer {TOKEN}"}
        models = (await client.get(f"{http.url}/v1/models", headers=headers)).json()
        assert [model["id"] for model in models["data"]] == ["tiny"]
        await http.post("/v1/completions", {"model": "tiny", "prompt": "a", "max_tokens": 3, "ignore_eos": True})
        metrics = (await client.get(f"{http.url}/metrics", headers=headers)).text
        assert 'tailrace_http_tokens_total{kind="response"} 3.0' in metrics


async def test_limits_of_bodies_prompts_and_time_are_kept(tiny_model: TinyModel) -> None:
    async with served(tiny_model("llama"), most_body=1000, most_prompts=2) as server:
        long = await server.post("/v1/completions", {"model": "tiny", "prompt": "a" * 2000})
        assert long.status_code == 413
        many = await server.post("/v1/completions", {"model": "tiny", "prompt": "a", "n": 3})
        assert many.status_code == 400, "to ask again would not help"
        await server.engine.pause_generation()
        asking = asyncio.create_task(server.post("/v1/completions", {"model": "tiny", "prompt": "a", "max_tokens": 2}))
        async with asyncio.timeout(20):
            while server.engine.stats().waiting == 0:
                await asyncio.sleep(0.01)
            crowded = await server.post("/v1/completions", {"model": "tiny", "prompt": "a", "n": 2})
            await server.engine.resume_generation()
            assert (crowded.status_code, (await asking).status_code) == (429, 200)
        fine = await server.post("/v1/completions", {"model": "tiny", "prompt": "a", "max_tokens": 2, "n": 2})
        assert fine.status_code == 200, "what has ended counts no more"
    async with served(tiny_model("llama"), limit_s=0.5) as server:
        await server.engine.pause_generation()
        late = await server.post("/v1/completions", {"model": "tiny", "prompt": "a"})
        assert late.status_code == 504
        streamed = await server.post("/v1/completions", {"model": "tiny", "prompt": "a", "stream": True})
        assert streamed.status_code == 200
        assert "longer than 0.5 s" in streamed.text


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
FIELDS = ("prompt", "n", "temperature", "top_p", "seed", "stop", "max_tokens", "top_k", "logprobs", "messages")
BODIES = st.binary(max_size=40) | st.dictionaries(st.sampled_from(FIELDS), JSON).map(
    lambda fields: json.dumps({"model": "tiny", **fields}).encode()
)


def test_any_body_is_read_or_refused(tiny_model: TinyModel) -> None:
    model = tiny_model("llama")
    tokenizer = load_tokenizer(model)
    tokenizer.chat_template = TEMPLATE
    reader = make_reader(model, tokenizer, name="tiny")

    @settings(max_examples=300)
    @given(BODIES)
    def read(body: bytes) -> None:
        for one in (reader.completion, reader.chatted):
            with suppress(Refusal):
                asked = one(body)
                assert all(0 < len(prompt) < reader.max_model_len for prompt in asked.prompts)

    read()


@given(st.lists(st.text(max_size=3), max_size=12), st.lists(st.text(min_size=1, max_size=3), max_size=2), st.data())
def test_text_is_the_same_in_whatever_pieces_it_comes(words: list[str], stops: list[str], data: st.DataObject) -> None:
    def decode(tokens: list[int]) -> str:
        return "".join(words[token] for token in tokens)

    tokens = list(range(len(words)))
    whole = TextStream(decode, stops).add(tokens, last=True)
    stream, text, left = TextStream(decode, stops), "", tokens
    while left:
        size = data.draw(st.integers(1, len(left)))
        text += stream.add(left[:size], last=size == len(left))
        assert whole.startswith(text)
        left = left[size:]
    assert text == whole
    assert not any(stop in whole for stop in stops)


def test_a_character_that_is_not_whole_yet_waits() -> None:
    parts = "aé€x".encode()

    def decode(tokens: list[int]) -> str:
        return bytes(tokens).decode("utf-8", errors="replace")

    stream = TextStream(decode, [])
    assert [stream.add([byte]) for byte in parts] == ["a", "", "é", "", "", "€", "x"]
