"""An engine without a model whose steps take the time that a step costs, for virtual time.

It decodes as the real one does: the sequences of a batch get a token each with every step, a prompt is computed before
its sequences decode, the requests with the largest priority begin first, and what is submitted or ended takes effect
at the end of the step under way. The steps between two such events are counted at once. So the work grows with the
events and not with the tokens.
"""

import asyncio
from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tailrace.engine.base import Engine, EngineLoad, EngineStats, SampleStream
from tailrace.errors import EngineError, RequestError
from tailrace.events import EventLog
from tailrace.planning.latency import StepTimes
from tailrace.types import CacheForm, FinishReason, IntArray, Piece, Request, Sample, SequenceCache, WeightVersion

_ROUNDING_S = 1e-9
"""By so much a timer may come too early."""
TokensOf = Callable[[Request], IntArray]
"""The response to a request, [R], whoever makes it."""


def tokens_by_seed(request: Request) -> IntArray:
    """Tokens and a length that the seed decides, between 1 and the most that was asked for."""
    chance = np.random.default_rng(request.seed % 2**64)
    most = request.sampling.max_new_tokens
    length = most if request.sampling.ignore_eos else int(chance.integers(1, most, endpoint=True))
    return chance.integers(0, 50, length)


@dataclass(eq=False, slots=True)
class _Sequence:
    request: Request
    tokens: IntArray
    """Those that it will have."""
    arrival: int
    made: int = 0
    versions: list[tuple[WeightVersion, int]] = field(default_factory=list)
    """Each version, and the number of tokens with it."""
    is_mixed: bool = False
    """Whether older weights computed some of its cache, while it runs."""

    @property
    def order(self) -> tuple[float, int]:
        return -self.request.priority, self.arrival

    @property
    def left(self) -> int:
        return len(self.tokens) - self.made

    @property
    def context(self) -> int:
        return len(self.request.prompt_ids) + self.made

    def advance(self, steps: int, version: WeightVersion) -> None:
        self.made += steps
        if steps:
            self.versions.append((version, steps))

    def newest(self, steps: int) -> Piece:
        start, tokens = self.made - steps, self.tokens[self.made - steps : self.made].tolist()
        log_probs = [-1.0 / (1 + place) for place in range(start + 1, self.made + 1)]
        return Piece(request_id=self.request.request_id, start=start, tokens=tokens, log_probs=log_probs)

    def sample(self, reason: FinishReason) -> Sample:
        begun = self.request.begun
        versions = [] if begun is None else [begun.weight_versions]
        versions += [np.full(steps, version) for version, steps in self.versions]
        made = self.tokens[: self.made]
        return Sample.of(
            self.request, made, -1.0 / (1 + made), np.concatenate(versions) if versions else np.empty(0), reason
        )


class TimedEngine(Engine):
    """See the module. One replica."""

    continues = True

    def __init__(
        self,
        costs: StepTimes,
        *,
        slots: int,
        cache_tokens: int = 2**40,
        tp: int = 1,
        tokens_of: TokensOf = tokens_by_seed,
        tells: bool = True,
        cache_form: CacheForm | None = None,
    ) -> None:
        """`tp`: the degree of `costs` that it has. `tells`: whether it tells its load. `cache_form`: see `Engine`."""
        self.cache_form = cache_form
        self._costs = costs
        self._tp = tp
        self._slots = slots
        self._cache_tokens = cache_tokens
        self._tokens_of = tokens_of
        self._tells = tells
        self._version: WeightVersion = 0
        self._waiting: list[_Sequence] = []
        """Sorted by order."""
        self._running: list[_Sequence] = []
        self._streams: dict[int, _Stream] = {}
        self._context = 0
        """Cached tokens of what runs, when the steps under way began."""
        self._arrivals = 0
        self._since: float | None = None
        """When the steps under way began; None while there is none."""
        self._timer: asyncio.TimerHandle | None = None
        self._boundary: asyncio.Event = asyncio.Event()
        self._paused = self._updating = False
        self._failure: EngineError | None = None
        self._see: Callable[[Sequence[Piece]], None] = lambda pieces: None
        self._steps = self._generated = self._prefilled = 0

    @property
    def max_model_len(self) -> int:
        """See `Engine`."""
        return 2**40

    def submit(self, requests: Sequence[Request]) -> SampleStream:
        """See `Engine`."""
        for request in requests:
            if request.request_id in self._streams:
                raise RequestError(f"request id {request.request_id} is in flight already; ids must differ")
        stream = _Stream(self, {request.request_id for request in requests})
        if self._failure is not None:
            stream.fail(self._failure)
            return stream
        for request in requests:
            self._streams[request.request_id] = stream
            made = 0 if request.begun is None else len(request.begun.response_ids)
            sequence = _Sequence(request, self._tokens_of(request), self._arrivals, made)
            insort(self._waiting, sequence, key=lambda other: other.order)
            self._arrivals += 1
        self._interrupt()
        return stream

    async def abort(self, request_ids: Iterable[int]) -> None:
        """See `Engine`."""
        await self._abort(request_ids, with_cache=False)

    async def withdraw(self, request_ids: Iterable[int]) -> None:
        """See `Engine`."""
        await self._abort(request_ids, with_cache=self.cache_form is not None)

    async def _abort(self, request_ids: Iterable[int], *, with_cache: bool) -> None:
        ids = set(request_ids) & self._streams.keys()
        while ids & self._streams.keys() and self._since is not None:
            self._interrupt()
            self._boundary.clear()
            await self._boundary.wait()
        for sequence in [*self._running, *self._waiting]:
            if sequence.request.request_id in ids:
                self._end(sequence, FinishReason.ABORT, self._cache_of(sequence) if with_cache else None)
        self._interrupt()

    async def pause_generation(self) -> None:
        """See `Engine`."""
        self._paused = True
        await self._until_still()

    async def _until_still(self) -> None:
        while self._since is not None:
            self._interrupt()
            self._boundary.clear()
            await self._boundary.wait()

    async def resume_generation(self) -> None:
        """See `Engine`."""
        self._paused = False
        self._interrupt()

    async def update_weights(self, version: WeightVersion, tensors: object) -> None:
        """See `Engine`; the tensors are not read."""
        self._updating = True
        try:
            await self._until_still()
        finally:
            self._updating = False
        self._version = version
        for sequence in self._running:
            sequence.is_mixed = True
        self._interrupt()

    def log_to(self, log: EventLog) -> None:
        """See `Engine`; it decides nothing."""

    def follow(self, see: Callable[[Sequence[Piece]], None]) -> None:
        """See `Engine`; it tells less often than after each step."""
        self._see = see

    def stats(self) -> EngineStats:
        """See `Engine`."""
        return EngineStats(
            running=len(self._running),
            waiting=len(self._waiting),
            generated_tokens=self._generated,
            prefilled_tokens=self._prefilled,
            steps=self._steps,
            version=self._version,
        )

    def load(self) -> EngineLoad | None:
        """See `Engine`."""
        if not self._tells:
            return None
        steps = self._steps_by_now()
        return EngineLoad(
            replicas=1,
            tp=self._tp,
            slots=self._slots,
            cache_tokens=self._cache_tokens,
            costs=self._costs,
            made={sequence.request.request_id: sequence.made + steps for sequence in self._running},
        )

    async def close(self) -> None:
        """See `Engine`."""
        self._failure = EngineError("the engine was closed")
        if self._timer is not None:
            self._timer.cancel()
        for stream in set(self._streams.values()):
            stream.fail(self._failure)
        self._streams.clear()
        self._since = None
        self._boundary.set()

    def _interrupt(self) -> None:
        """Have what has changed take effect at the end of the step under way."""
        if self._since is None:
            self._begin()
            return
        assert self._timer is not None
        self._timer.cancel()
        self._set_timer(min(self._steps_by_now() + 1, self._next_end()))

    def _begin(self) -> None:
        """Begin steps with all that has room."""
        if self._paused or self._updating:
            return
        prefill_s = self._start_waiting()
        if self._failure is not None or not self._running:
            return
        self._context = sum(sequence.context for sequence in self._running)
        self._since = asyncio.get_running_loop().time() + prefill_s
        self._set_timer(self._next_end())

    def _start_waiting(self) -> float:
        """Let waiting sequences begin. Return the seconds that their tokens take to compute; a prompt counts once."""
        seconds = 0.0
        prompts = {sequence.request.group_id for sequence in self._running}
        held = sum(sequence.context + sequence.left for sequence in self._running)
        while self._waiting and len(self._running) < self._slots:
            needed = self._waiting[0].context + self._waiting[0].left
            if self._running and held + needed > self._cache_tokens:
                break
            sequence = self._waiting.pop(0)
            held += needed
            tokens = self._take_over(sequence)
            if tokens is None:
                known = sequence.request.group_id in prompts
                tokens = sequence.made + (0 if known else len(sequence.request.prompt_ids))
                prompts.add(sequence.request.group_id)
            seconds += self._costs.prefill_s(self._tp, 1, tokens)
            self._prefilled += tokens
            self._running.append(sequence)
        return seconds

    def _cache_of(self, sequence: _Sequence) -> SequenceCache | None:
        """The cache of what runs, without contents; what waits gives back what it came with."""
        assert self.cache_form is not None
        if sequence in self._waiting:
            return None if sequence.request.begun is None else sequence.request.begun.cache
        tokens = sequence.context - 1
        data = np.broadcast_to(np.uint8(0), (1, 1, tokens, 1, self.cache_form.token_bytes))
        return SequenceCache(
            form=self.cache_form, tokens=tokens, version=self._version, is_mixed=sequence.is_mixed, data=data
        )

    def _take_over(self, sequence: _Sequence) -> int | None:
        """The tokens to compute where a sequence has come with a cache that fits."""
        begun = sequence.request.begun
        if begun is None or begun.cache is None or self.cache_form is None:
            return None
        if (use := begun.cache.use(self.cache_form, self._version, keeps=True)) is None:
            return None
        sequence.is_mixed = use == "own"
        return sequence.context - 1 - begun.cache.tokens

    def _next_end(self) -> int:
        return max(1, min(sequence.left for sequence in self._running))

    def _seconds(self, steps: int) -> float:
        """Seconds of so many steps of the batch; with each, all contexts grow by a token."""
        size = len(self._running)
        return steps * self._costs.step_s(self._tp, size, self._context + size * (steps - 1) / 2, 1)

    def _steps_by_now(self) -> int:
        """Steps that have ended since they began."""
        if self._since is None:
            return 0
        passed = asyncio.get_running_loop().time() - self._since + _ROUNDING_S
        low, high = 0, self._next_end()
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._seconds(middle) <= passed else (low, middle - 1)
        return low

    def _set_timer(self, steps: int) -> None:
        assert self._since is not None
        self._timer = asyncio.get_running_loop().call_at(self._since + self._seconds(steps), self._end_steps, steps)

    def _end_steps(self, steps: int) -> None:
        for sequence in self._running:
            sequence.advance(steps, self._version)
        self._steps += steps
        self._generated += steps * len(self._running)
        for sequence in [sequence for sequence in self._running if not sequence.left]:
            most = sequence.request.sampling.max_new_tokens
            self._end(sequence, FinishReason.LENGTH if len(sequence.tokens) == most else FinishReason.STOP)
        if pieces := [sequence.newest(steps) for sequence in self._running if sequence.request.streams]:
            self._see(pieces)
        self._since = None
        self._boundary.set()
        asyncio.get_running_loop().call_soon(self._go_on)  # after those who wait for the end of a step

    def _go_on(self) -> None:
        if self._since is None:
            self._begin()

    def _end(self, sequence: _Sequence, reason: FinishReason, cache: SequenceCache | None = None) -> None:
        (self._running if sequence in self._running else self._waiting).remove(sequence)
        request_id = sequence.request.request_id
        self._streams.pop(request_id).put(request_id, replace(sequence.sample(reason), cache=cache))


class _Stream(SampleStream):
    def __init__(self, engine: TimedEngine, pending: set[int]) -> None:
        self._engine = engine
        self._pending = pending
        self._ended: asyncio.Queue[Sample | EngineError] = asyncio.Queue()
        self._closed = False

    def put(self, request_id: int, sample: Sample) -> None:
        self._pending.discard(request_id)
        self._ended.put_nowait(sample)

    def fail(self, error: EngineError) -> None:
        self._ended.put_nowait(error)

    async def __anext__(self) -> Sample:
        if self._closed or (not self._pending and self._ended.empty()):
            raise StopAsyncIteration
        answer = await self._ended.get()
        if isinstance(answer, EngineError):
            raise answer
        return answer

    async def aclose(self) -> None:
        if not self._closed:
            self._closed = True
            await self._engine.abort(self._pending)
