"""Turns a synchronous core into an asynchronous engine.

Dataflow: `submit` puts requests into an inbox and starts the loop, unless it runs. The loop goes on while there is work
and no pause. It hands the inbox and the aborts to the core, runs one step of it in the executor, and hands finished
samples to their streams.

Waiting: the lock `_turn` is held for each step. Pausing, aborting and updating weights take it in the order of asking,
so they get in between two steps. With several replicas a step ends when the first of them is done, and others go on
computing without the lock. So pausing and updating weights settle the core first. A stream waits for its queue.
Nothing waits while there is no work.

Everything except the core's own calls runs in the event loop's thread. Adding and aborting are plain bookkeeping and
happen there too, under the lock.
"""

import asyncio
import math
import numbers
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np

from tailrace.engine.base import Engine, EngineLoad, EngineStats, SampleStream
from tailrace.errors import EngineError, RequestError, one_line
from tailrace.types import CacheForm, Piece, Request, Sample, WeightVersion

if TYPE_CHECKING:
    from tailrace.engine.model.weights import Weights

Result = TypeVar("Result")


class Core(Protocol):
    """The core that the driver needs. One call at a time, except for `check`, `max_model_len`, `stats`, `load`,
    `take_seconds`, `memory` and `interrupt`.

    A step may leave work under way, on ranks that run beside each other; `settle` waits for it and starts no more.
    After an error of either, the core is of no further use. Methods with a body here are optional.
    """

    max_model_len: int
    """The most tokens of a sequence, prompt and response together."""
    continues: bool = False
    """See `Engine`."""
    cache_form: CacheForm | None = None
    """See `Engine`."""
    to_abort: Collection[int] = ()
    """The requests to abort. It is the engine's own set, for cores whose steps are long."""
    weights_are_whole: bool = True
    """False from the first change that `load_weights` makes to the last. An error in between leaves no weights."""

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        ...

    def check(self, request: Request) -> None:
        """Raise RequestError if the request can never be served."""
        ...

    def add(self, request: Request) -> None:
        """Queue a request that was checked."""
        ...

    def abort(self, request_ids: Iterable[int]) -> list[Sample]:
        """Finish these requests with what they have; unknown ids are ignored."""
        ...

    def withdraw(self, request_ids: Collection[int]) -> list[Sample]:
        """See `Engine.withdraw`. Nothing may be under way."""
        return self.abort(request_ids)

    def step(self) -> list[Sample]:
        """Work a little. Return the samples that finished, if any."""
        ...

    def settle(self) -> list[Sample]:
        """Wait for work that is under way between two steps. Return the samples that finished."""
        return []

    def load_weights(self, version: WeightVersion, tensors: "Weights") -> None:
        """Install new weights, or raise EngineError and keep the old ones. Nothing may be under way."""
        ...

    def stats(self) -> EngineStats:
        """Return the counts. Callable from any thread."""
        ...

    def pieces(self, told: Mapping[int, int]) -> list[Piece]:
        """Return what is new of responses that run. `told`: the tokens of each that are known, by request."""
        return []

    def load(self) -> EngineLoad | None:
        """See `Engine.load`. Callable from any thread."""
        return None

    def take_seconds(self) -> Mapping[str, float]:
        """See `Engine.take_seconds`."""
        return {}

    def memory(self) -> Mapping[str, int]:
        """See `Engine.memory`."""
        return {}

    def interrupt(self) -> None:
        """Let the call under way end soon, even with an error. Callable from any thread; only `close` may follow."""
        return

    def close(self) -> None:
        """Release what the core holds."""
        return


class DrivenEngine(Engine):
    """An engine around a core."""

    def __init__(self, core: Core, executor: Executor) -> None:
        self._core = core
        self.continues, self.cache_form = core.continues, core.cache_form
        self._executor = executor
        self._inbox: list[Request] = []
        self._to_abort: set[int] = set()
        core.to_abort = self._to_abort
        self._streams: dict[int, _Stream] = {}
        self._see: Callable[[Sequence[Piece]], None] | None = None
        self._told: dict[int, int] = {}
        """The tokens that were told of each request that streams."""
        self._turn = asyncio.Lock()
        self._loop: asyncio.Task[None] | None = None
        self._paused = False
        self._failure: EngineError | None = None

    @property
    def max_model_len(self) -> int:
        """See `Engine`."""
        return self._core.max_model_len

    def submit(self, requests: Sequence[Request]) -> SampleStream:
        """See `Engine`."""
        requests = [_plain(request) for request in requests]
        seen = set(self._streams)
        for request in requests:
            if request.request_id in seen:
                raise RequestError(f"request id {request.request_id} is in flight already; ids must differ")
            seen.add(request.request_id)
            if request.begun is not None and not self.continues:
                raise RequestError(f"request {request.request_id} has `begun`, and this engine starts all anew")
            self._core.check(request)
        stream = _Stream(self, {request.request_id for request in requests})
        if self._failure is not None:
            stream.fail(self._failure)
            return stream
        self._streams |= dict.fromkeys(stream.pending, stream)
        for request in requests:
            if request.streams:
                self._told[request.request_id] = 0 if request.begun is None else len(request.begun.response_ids)
        self._inbox += requests
        self._wake()
        return stream

    async def abort(self, request_ids: Iterable[int]) -> None:
        """See `Engine`."""
        self._to_abort |= self._streams.keys() & set(request_ids)
        try:
            async with self._turn:
                self._empty_inbox()
        except asyncio.CancelledError:
            self._wake()
            raise

    async def withdraw(self, request_ids: Iterable[int]) -> None:
        """See `Engine`."""
        if self.cache_form is None:
            await self.abort(request_ids)
            return
        wanted = set(request_ids)
        async with self._turn:
            if self._failure is None:
                self._empty_inbox()
                await self._advance(self._core.settle)
            if self._failure is None and (withdrawn := self._streams.keys() & wanted):
                await self._advance(lambda: self._core.withdraw(withdrawn))

    async def pause_generation(self) -> None:
        """See `Engine`."""
        self._paused = True
        async with self._turn:
            if self._failure is None:
                await self._advance(self._core.settle)

    async def resume_generation(self) -> None:
        """See `Engine`."""
        self._paused = False
        self._wake()

    async def update_weights(self, version: WeightVersion, tensors: "Weights") -> None:
        """See `Engine`."""
        async with self._turn:
            if self._failure is not None:
                raise EngineError(str(self._failure)) from self._failure  # the failure itself would collect tracebacks
            await self._advance(self._core.settle)
            await _ended(self._start(self._core.load_weights, version, tensors))

    def follow(self, see: Callable[[Sequence[Piece]], None]) -> None:
        """See `Engine`."""
        self._see = see

    def stats(self) -> EngineStats:
        """See `Engine`."""
        stats = self._core.stats()
        return replace(stats, waiting=stats.waiting + len(self._inbox))

    def load(self) -> EngineLoad | None:
        """See `Engine`."""
        return self._core.load()

    def take_seconds(self) -> Mapping[str, float]:
        """See `Engine`."""
        return self._core.take_seconds()

    def memory(self) -> Mapping[str, int]:
        """See `Engine`."""
        return self._core.memory()

    async def close(self) -> None:
        """See `Engine`."""
        self._fail(EngineError("the engine was closed"))
        self._core.interrupt()
        async with self._turn:  # free once the step under way has ended
            await _ended(self._start(self._core.close))
        if self._loop is not None and not self._loop.done():  # a loop of an earlier asyncio.run is done
            await asyncio.wait([self._loop])

    def _wake(self) -> None:
        if self._loop is None or self._loop.done():
            self._loop = asyncio.get_running_loop().create_task(self._generate())
            self._loop.add_done_callback(self._on_loop_end)

    async def _generate(self) -> None:
        while True:
            async with self._turn:
                if self._failure is not None:
                    return
                self._empty_inbox()
                if self._paused or not self._core.has_work:
                    return
                if not self._core.weights_are_whole:
                    raise EngineError("loading the last weights failed halfway, so there are none to generate with")
                await self._advance(self._core.step)

    async def _advance(self, call: Callable[[], list[Sample]]) -> None:
        """Step or settle; `_turn` must be held. Even when cancelled, give the streams the samples, or the error."""
        work = self._start(call)
        try:
            await _ended(work)
        finally:
            error = work.exception()
            if error is None:
                self._deliver(work.result())
            else:
                self._fail(_generation_failed(error))
            self._tell_pieces()
            self._advanced()

    def _tell_pieces(self) -> None:
        if self._see is None or not self._told or self._failure is not None:
            return
        if pieces := self._core.pieces(self._told):
            for piece in pieces:
                self._told[piece.request_id] += len(piece.tokens)
            self._see(pieces)

    def _advanced(self) -> None:
        """Handle the end of a step or a settling, in the event loop; for subclasses."""

    def _start(self, call: Callable[..., Result], *arguments: object) -> asyncio.Future[Result]:
        return asyncio.get_running_loop().run_in_executor(self._executor, call, *arguments)

    def _on_loop_end(self, loop: asyncio.Task[None]) -> None:
        if loop.cancelled():
            self._fail(EngineError("generation was cancelled"))
        elif (error := loop.exception()) is not None:
            self._fail(_generation_failed(error))

    def _fail(self, failure: EngineError) -> None:
        """End every stream with the first failure of the engine."""
        self._failure = self._failure or failure
        for stream in set(self._streams.values()):
            stream.fail(self._failure)
        self._streams.clear()
        self._inbox.clear()
        self._told.clear()
        self._to_abort.clear()

    def _empty_inbox(self) -> None:
        """Hand the core the requests and aborts since its last step; `_turn` must be held."""
        for request in self._inbox:
            try:
                self._core.add(request)
            except Exception as error:  # whatever a library raises; it refuses this request alone
                refusal = RequestError(f"request {request.request_id} was refused: {one_line(error)}")
                refusal.__cause__ = error
                self._answer(request.request_id, refusal)
        self._inbox.clear()
        if self._to_abort:
            self._deliver(self._core.abort(self._to_abort.copy()))

    def _deliver(self, samples: Iterable[Sample]) -> None:
        for sample in samples:
            self._answer(sample.request_id, sample)

    def _answer(self, request_id: int, answer: Sample | RequestError) -> None:
        self._to_abort.discard(request_id)
        self._told.pop(request_id, None)
        stream = self._streams.pop(request_id, None)
        if stream is not None:  # none: the engine was closed during the step
            stream.put(request_id, answer)


class _Stream(SampleStream):
    """The stream of one `submit`. Samples wait here until they are taken."""

    def __init__(self, engine: DrivenEngine, request_ids: set[int]) -> None:
        self.pending = request_ids
        """Requests without an answer yet."""
        self._engine = engine
        self._ready: deque[Sample | RequestError] = deque()
        self._failure: EngineError | None = None
        self._closed = False
        self._news = asyncio.Event()

    def put(self, request_id: int, answer: Sample | RequestError) -> None:
        self.pending.discard(request_id)
        self._ready.append(answer)
        self._news.set()

    def fail(self, failure: EngineError) -> None:
        self._failure = failure
        self._news.set()

    async def __anext__(self) -> Sample:
        while not self._closed:
            if self._ready:
                answer = self._ready.popleft()
                if isinstance(answer, RequestError):
                    raise answer
                return answer
            if self._failure is not None:
                raise EngineError(str(self._failure)) from self._failure
            if not self.pending:
                break
            self._news.clear()
            await self._news.wait()  # wakes all who wait, so that the end reaches each of them
        raise StopAsyncIteration

    async def aclose(self) -> None:
        if not self._closed:
            self._closed = True
            self._news.set()
            await self._engine.abort(self.pending)


async def _ended(work: asyncio.Future[Result]) -> Result:
    """Return the result of work in the executor. Even when cancelled, return no earlier than the work ends."""
    try:
        return await asyncio.shield(work)
    finally:
        while not work.done():
            with suppress(asyncio.CancelledError):  # the first cancellation is being raised already
                await asyncio.wait([work])


def _generation_failed(error: BaseException) -> EngineError:
    failure = EngineError(f"generation failed: {type(error).__name__}: {one_line(error)}")
    failure.__cause__ = error
    return failure


def _plain(request: Request) -> Request:
    """Return the request in plain numbers, with a copy of its prompt: later changes by the caller have no effect.

    Raises:
        RequestError: a field is of another type.
    """
    prompt = request.prompt_ids
    if not isinstance(prompt, np.ndarray) or prompt.ndim != 1 or not np.issubdtype(prompt.dtype, np.integer):
        raise RequestError(f"request {request.request_id} has prompt_ids that are no one-dimensional array of integers")
    if not isinstance(request.seed, numbers.Integral):
        raise RequestError(f"request {request.request_id} has the seed {request.seed!r}; it is an integer")
    if not isinstance(request.priority, numbers.Real) or not math.isfinite(request.priority):
        raise RequestError(f"request {request.request_id} has the priority {request.priority!r}; it is a finite number")
    return replace(
        request,
        prompt_ids=prompt.astype(np.int64),
        seed=int(request.seed),
        priority=float(request.priority),
        begun=None if request.begun is None else _begun(request.request_id, request.begun),
    )


def _begun(request_id: int, sample: Sample) -> Sample:
    """Return a copy of what a response begins with.

    Raises:
        RequestError: its tokens have not one log-probability and one weight version each.
    """
    tokens, log_probs, versions = map(np.array, (sample.response_ids, sample.rollout_log_probs, sample.weight_versions))
    if not tokens.ndim == 1 == log_probs.ndim == versions.ndim or not len(tokens) == len(log_probs) == len(versions):
        raise RequestError(
            f"request {request_id} has `begun` with arrays of the shapes {tokens.shape}, {log_probs.shape} and "
            f"{versions.shape}; each token has one log-probability and one weight version"
        )
    return replace(sample, response_ids=tokens, rollout_log_probs=log_probs, weight_versions=versions)


def check_prompt(request: Request, *, max_model_len: int, vocab_size: int | None = None) -> None:
    """Check that the prompt has tokens, and leaves room for one more. All must be of the vocabulary (None: any).

    Raises:
        RequestError: the prompt is empty, too long, or has an unknown token.
    """
    prompt = request.prompt_ids
    if not len(prompt):
        raise RequestError(f"request {request.request_id} has an empty prompt; it needs one token at least")
    if len(prompt) >= max_model_len:
        raise RequestError(
            f"request {request.request_id} has a prompt of {len(prompt)} tokens; the context of "
            f"{max_model_len} leaves room for {max_model_len - 1}"
        )
    begun = prompt[:0] if request.begun is None else request.begun.response_ids
    for what, tokens in (("a prompt token", prompt), ("`begun` with a token", begun)):
        if vocab_size is not None and len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size:
            raise RequestError(f"request {request.request_id} has {what} outside the vocabulary, 0 … {vocab_size - 1}")
