"""The routes of OpenAI's API in front of the generation service.

    POST /v1/completions, /v1/chat/completions    whole answers, or chunks as server-sent events
    GET /v1/models, /health, /metrics

Waiting: a request waits for the service up to `limit_s`. A client that goes away ends its request, in the engine too;
an engine ends one between two steps, and no answer waits for that. More prompts than `most_prompts` at a time are
refused at once. Bodies are read in a thread: a long one takes seconds, in which everything else goes on.
"""

import asyncio
import hmac
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from tailrace.errors import EngineError, RequestError, TailraceError
from tailrace.rollout.http.answers import DONE, Answers, error_body
from tailrace.rollout.http.asked import Asked, Reader, Refusal
from tailrace.rollout.http.text import TextStream
from tailrace.rollout.service import GenerationService
from tailrace.rollout.streams import GeneratedStream
from tailrace.types import Piece, Sample, WeightVersion
from tailrace.types import Request as Wanted

_GROUPS = -(2**40)
"""The first group of requests, below those of evaluations; further ones are lower."""
_OTHERWISE = "an engine died, and another made the response anew with other weights; ask again"
Decode = Callable[[list[int]], str]
"""The text of tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the server allows."""

    most_body: int = 8 * 2**20
    """Bytes of a body."""
    most_prompts: int = 1024
    """Responses that are generated at a time."""
    limit_s: float = 600.0
    """Seconds of one request."""


class Endpoint:
    """Answers requests with a service. Use `app` from the service's event loop."""

    def __init__(
        self,
        service: GenerationService,
        reader: Reader,
        decode: Decode,
        *,
        token: str | None,
        limits: Limits,
        newest: Callable[[], WeightVersion] = lambda: 0,
    ) -> None:
        """`decode`: the text of tokens. `token`: the bearer token that every request but /health needs; None: none.

        `newest`: returns the version of the newest weights that there are.
        """
        self._newest = newest
        self._service = service
        self._reader = reader
        self._decode = decode
        self._token = token
        self._limits = limits
        self._in_flight = 0
        self._groups = _GROUPS
        self._open: set[asyncio.Timeout] = set()
        """The limits of the requests that are served."""
        self._left: set[asyncio.Task[list[Sample]]] = set()
        """What no one waits for, until its engine has dropped it."""
        self._is_ending = False
        registry = self._registry = CollectorRegistry()
        self._requests = Counter(
            "tailrace_http_requests", "Requests by route and status.", ["route", "status"], registry=registry
        )
        self._tokens = Counter(
            "tailrace_http_tokens", "Tokens of prompts and of responses.", ["kind"], registry=registry
        )
        self._seconds = Histogram("tailrace_http_seconds", "Seconds of a request.", registry=registry)
        Gauge("tailrace_http_prompts_in_flight", "Responses in flight.", registry=registry).set_function(
            lambda: self._in_flight
        )
        self.app = Starlette(
            routes=[
                Route("/v1/completions", self._completions, methods=["POST"]),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/v1/models", self._models),
                Route("/v1/models/{name:path}", self._model),
                Route("/health", self._health),
                Route("/metrics", self._metrics),
            ],
            exception_handlers={404: _not_found, 405: _not_allowed, Refusal: _refusing, Exception: _broken},
        )

    def end(self) -> None:
        """Answer all requests with an error, those that are open and those that still come."""
        self._is_ending = True
        for limit in self._open:
            if not limit.expired():
                limit.reschedule(0)

    async def _completions(self, request: Request) -> Response:
        return await self._serve(request, is_chat=False)

    async def _chat(self, request: Request) -> Response:
        return await self._serve(request, is_chat=True)

    async def _serve(self, request: Request, *, is_chat: bool) -> Response:
        route, start = request.url.path, time.perf_counter()
        try:
            self._check_token(request)
            async with self._limited():
                body = await self._body(request)
                read = self._reader.chatted if is_chat else self._reader.completion
                response = await self._answer(request, await asyncio.to_thread(read, body))
        except Refusal as refusal:
            response = _refused(refusal)
        except RequestError as error:
            response = _refused(Refusal(str(error)))
        except TailraceError as error:
            response = _refused(Refusal(str(error), status=503, code="server_error"))
        except ClientDisconnect:
            response = Response(status_code=499)
        self._requests.labels(route, response.status_code).inc()
        self._seconds.observe(time.perf_counter() - start)
        return response

    @asynccontextmanager
    async def _limited(self) -> AsyncIterator[None]:
        """Limit the time of the block.

        Raises:
            Refusal: the time is over, or the server ends.
        """
        ends = Refusal("the server ends; ask another, or this one later", status=503, code="server_error")
        if self._is_ending:
            raise ends
        try:
            async with asyncio.timeout(self._limits.limit_s) as limit:
                self._open.add(limit)
                try:
                    yield
                finally:
                    self._open.discard(limit)
        except TimeoutError:
            late = f"the request has taken longer than {self._limits.limit_s:g} s"
            raise ends if self._is_ending else Refusal(late, status=504, code="timeout") from None

    def _check_token(self, request: Request) -> None:
        if self._token is None:
            return
        given = request.headers.get("authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {self._token}".encode()):
            raise Refusal("the bearer token is missing or wrong", status=401, code="invalid_api_key")

    async def _body(self, request: Request) -> bytes:
        parts, size = [], 0
        async for part in request.stream():
            size += len(part)
            if size > self._limits.most_body:
                raise Refusal(
                    f"the body has more than {self._limits.most_body} bytes", status=413, code="request_too_large"
                )
            parts.append(part)
        return b"".join(parts)

    async def _answer(self, request: Request, asked: Asked) -> Response:
        count = len(asked.prompts) * asked.n
        if asked.version > (newest := self._newest()):
            raise Refusal(
                f"weights of version {asked.version} are asked for, and the newest are of version {newest}; try later",
                status=409,
                code="weights_too_old",
                param="weight_version",
            )
        if count > self._limits.most_prompts:
            raise Refusal(
                f"{count} responses are asked for, and at most {self._limits.most_prompts} are generated at a time; "
                "ask for fewer"
            )
        if self._in_flight + count > self._limits.most_prompts:
            raise Refusal(
                f"{self._in_flight} responses are in flight, and with {count} more there would be more than "
                f"{self._limits.most_prompts}; try again later",
                status=429,
                code="rate_limit_exceeded",
            )
        self._count_in_flight(count)
        if asked.stream:
            return _Streaming(self._chunks(asked, count), lambda: self._count_in_flight(-count))
        samples = await self._unless_gone(request, asked, count)
        texts = [(self._text(asked, sample), sample) for sample in samples]
        return Response(Answers(asked, self._token_text).whole(texts), media_type="application/json")

    async def _unless_gone(self, request: Request, asked: Asked, count: int) -> list[Sample]:
        """Generate, unless the client goes away.

        Raises:
            ClientDisconnect: it has.
        """
        working = asyncio.create_task(self._samples(asked, count))
        self._left.add(working)
        working.add_done_callback(lambda task: self._on_end(task, count))
        leaving = asyncio.create_task(_gone(request.receive))
        try:
            await asyncio.wait([working, leaving], return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise ClientDisconnect
            return working.result()
        finally:
            working.cancel()
            leaving.cancel()

    def _on_end(self, task: "asyncio.Task[list[Sample]]", count: int) -> None:
        self._left.discard(task)
        self._count_in_flight(-count)
        if not task.cancelled():
            task.exception()  # where no one waits for it, no one is told

    async def _samples(self, asked: Asked, count: int) -> list[Sample]:
        async with aclosing(self._generate(asked, count)) as stream:
            made = {one.sample.request_id: one.sample async for one in stream}
        self._count_out(asked, made.values())
        return [made[number] for number in range(count)]

    def _count_in_flight(self, more: int) -> None:
        self._in_flight += more

    async def _chunks(self, asked: Asked, count: int) -> AsyncGenerator[bytes, None]:
        """The chunks of a stream. An error after the first one is a chunk, too: the status has been sent."""
        answers = Answers(asked, self._token_text)
        texts = [TextStream(self._decode, asked.sampling.stop) for _ in range(count)]
        told: list[list[int]] = [[] for _ in range(count)]
        made: list[Sample] = []
        async with aclosing(self._generate(asked, count)) as stream:
            try:
                async with self._limited():
                    for index in range(count if asked.is_chat else 0):
                        yield answers.role(index)
                    async for item in stream.with_pieces():
                        if isinstance(item, Piece):
                            index = item.request_id
                            told[index] += item.tokens
                            text = texts[index].add(item.tokens)
                            if text or asked.token_ids or asked.log_probs:
                                yield answers.piece(index, text, item.tokens, item.log_probs)
                        else:
                            sample, index = item.sample, item.sample.request_id
                            known = len(told[index])
                            tokens, log_probs = sample.response_ids.tolist(), sample.rollout_log_probs.tolist()
                            if tokens[:known] != told[index]:
                                raise EngineError(_OTHERWISE)
                            tokens, log_probs = tokens[known:], log_probs[known:]
                            yield answers.end(index, texts[index].add(tokens, last=True), tokens, log_probs, sample)
                            made.append(sample)
                if asked.include_usage:
                    yield answers.usage(sum(len(sample.response_ids) for sample in made))
                self._count_out(asked, made)
                yield DONE
            except Refusal as refusal:
                yield _error_event(str(refusal), refusal.code)
            except RequestError as error:
                yield _error_event(str(error), "invalid_request_error")
            except TailraceError as error:
                yield _error_event(str(error), "server_error")

    def _generate(self, asked: Asked, count: int) -> GeneratedStream:
        requests = [
            Wanted(
                request_id=number,
                group_id=self._groups - number // asked.n,
                number=number % asked.n,
                prompt_ids=asked.prompts[number // asked.n],
                sampling=asked.sampling,
                seed=asked.seed + number,
                streams=asked.stream,
            )
            for number in range(count)
        ]
        self._groups -= len(asked.prompts)
        stream = self._service.generate(requests, version=asked.version)
        stream.wants_pieces = asked.stream
        return stream

    def _text(self, asked: Asked, sample: Sample) -> str:
        return TextStream(self._decode, asked.sampling.stop).add(sample.response_ids.tolist(), last=True)

    def _token_text(self, token: int) -> str:
        return self._decode([token])

    def _count_out(self, asked: Asked, samples: Iterable[Sample]) -> None:
        self._tokens.labels("prompt").inc(sum(map(len, asked.prompts)))
        self._tokens.labels("response").inc(sum(len(sample.response_ids) for sample in samples))

    async def _models(self, request: Request) -> Response:
        self._check_token(request)
        return _json({"object": "list", "data": [self._described()]})

    async def _model(self, request: Request) -> Response:
        self._check_token(request)
        self._reader.check_model(request.path_params["name"])
        return _json(self._described())

    def _described(self) -> dict[str, object]:
        model = {"id": self._reader.model, "object": "model", "created": 0, "owned_by": "tailrace"}
        return {**model, "max_model_len": self._reader.max_model_len}

    async def _health(self, request: Request) -> Response:
        engines = self._service.ready_engines
        return _json({"status": "ok" if engines else "starting", "engines": engines}, 200 if engines else 503)

    async def _metrics(self, request: Request) -> Response:
        self._check_token(request)
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)


class _Streaming(Response):
    """A response of server-sent events, which ends when the client goes away, even while there is nothing to send.

    `StreamingResponse` does not wait for its generator to be closed then, so the engine would go on.
    """

    def __init__(self, chunks: AsyncGenerator[bytes, None], ended: Callable[[], None]) -> None:
        """`ended` is called when it has ended in any way."""
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._chunks = chunks
        self._ended = ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all chunks."""
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            sending, leaving = asyncio.create_task(self._send(send)), asyncio.create_task(_gone(receive))
            try:
                await asyncio.wait([sending, leaving], return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in (sending, leaving):
                    task.cancel()
                await asyncio.wait([sending, leaving])
            if not sending.cancelled() and not isinstance(error := sending.exception(), OSError | None):
                raise error
        finally:
            self._ended()

    async def _send(self, send: Send) -> None:
        async with aclosing(self._chunks) as chunks:
            async for chunk in chunks:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _gone(receive: Receive) -> None:
    """Wait until the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _refused(refusal: Refusal) -> Response:
    body = error_body(str(refusal), refusal.code, refusal.param)
    headers = {"www-authenticate": "Bearer"} if refusal.status == 401 else {}
    return Response(body, status_code=refusal.status, media_type="application/json", headers=headers)


def _error_event(message: str, code: str) -> bytes:
    return b"data: " + error_body(message, code, "") + b"\n\n"


def _json(content: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status_code=status, media_type="application/json")


async def _not_found(request: Request, error: Exception) -> Response:
    routes = "/v1/completions, /v1/chat/completions, /v1/models, /health, /metrics"
    text = f"{request.url.path} is no route; there are {routes}"
    return _refused(Refusal(text, status=404, code="not_found"))


async def _not_allowed(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = f"{request.method} is not for {request.url.path}"
    response = _refused(Refusal(text, status=405, code="method_not_allowed"))
    response.headers.update(error.headers or {})
    return response


async def _refusing(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    return _refused(error)


async def _broken(request: Request, error: Exception) -> Response:
    text = f"the server has failed: {type(error).__name__}; its log says more"
    return _refused(Refusal(text, status=500, code="server_error"))
