"""One object in front of all engines of a run: it places requests on them, and streams their samples.

    generate ──jobs──▶ arrived ──policy──▶ planned for an engine ──as it has room──▶ its port
       ◀──────────────────────────samples, in the order in which they finish────────────┘

A job is a group of requests, which share the cache of their prompt. What an engine has no room for yet stays here, so
that it can still go to another one. A policy (`planning.dispatch`) decides where jobs go: when some arrive, and again
when an engine runs dry while others have some waiting.

When the process of an engine dies, what it had goes back among the jobs and is generated again, from the same seeds.
So each request ends once, whoever dies. What comes late, of a request that is generated elsewhere or that no one waits
for, is not known here any more and is thrown away.

Source: StreamRL, section 3 (the stream generation service) and section 5.3 (dispatching).
"""

import asyncio
import itertools
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from tailrace.engine.base import SampleStream
from tailrace.errors import EngineError, RequestError, WorkerDied
from tailrace.planning.dispatch.base import EngineState, Policy
from tailrace.planning.dispatch.base import Job as Planned
from tailrace.planning.dispatch.simple import Pull
from tailrace.rollout.base import EngineFacts, EnginePort, Finished, News, Parcel
from tailrace.types import Request, Sample, WeightVersion

_ANY = 2**40
"""Room without a bound."""


@dataclass(frozen=True, slots=True)
class _SameSteps:
    """The steps of engines of which nothing is known."""

    def step_s(self, tp: int, batch_size: float, context_tokens: float, replicas: int) -> float:
        """See `StepTimes`."""
        return 1.0

    def prefill_s(self, tp: int, batch_size: float, rms_length: float) -> float:
        """See `StepTimes`."""
        return 1.0


_UNKNOWN = _SameSteps()


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """A sample, and where it was made."""

    sample: Sample
    worker: str
    """See `EnginePort.name`."""
    start: float
    """See `Finished`."""
    end: float


class GenerationService:
    """Generates with whichever engines there are. Use it from one event loop."""

    def __init__(self, ports: Sequence[EnginePort], policy: Policy | None = None) -> None:
        """`policy`: by default `Pull`."""
        self._engines = [_Engine(port) for port in ports]
        self._policy = policy or Pull()
        self._arrived: deque[_Job] = deque()
        """What no engine is planned for yet, in the order of arrival."""
        self._ids = itertools.count()
        self._streams: set[GeneratedStream] = set()
        self._work: set[asyncio.Task[None]] = set()
        self._failed: asyncio.Future[None] | None = None
        """Gets the error that ends `run`."""

    async def run(self) -> None:
        """Serve until cancelled.

        Raises:
            TailraceError: an engine has failed, or one that died was not replaced.
        """
        self._failed = asyncio.get_running_loop().create_future()
        for engine in self._engines:
            self._do(self._tend(engine))
        try:
            await self._failed
        finally:
            for work in self._work:
                work.cancel()
            if self._work:
                await asyncio.wait(self._work)
            for stream in set(self._streams):
                stream.fail(EngineError("the generation service has ended"))

    def generate(
        self, requests: Iterable[Request], *, version: WeightVersion = 0, step: int | None = None
    ) -> "GeneratedStream":
        """Accept requests, and stream their samples as they finish. Closing the stream ends what it has not yielded.

        Args:
            requests: their ids are unique among themselves. Those of one group stand together.
            version: the weights that begin them are of this version or newer.
            step: the training step that they are for.

        Raises:
            RequestError: from the stream: an engine cannot serve one of them. Others may still come.
            EngineError: from the stream: no further sample will come.
        """
        stream = GeneratedStream(self)
        self._streams.add(stream)
        for _, group in itertools.groupby(requests, key=lambda request: request.group_id):
            asked = {next(self._ids): request for request in group}
            stream.pending |= asked.keys()
            self._arrived.append(_Job(stream=stream, requests=asked, version=version, step=step))
        self._decide()
        return stream

    def newest(self, version: Callable[[], WeightVersion]) -> "NewestGenerator":
        """A generator like an engine, for whom the weights of the moment matter. `version`: returns theirs."""
        return NewestGenerator(self, version)

    async def _tend(self, engine: "_Engine") -> None:
        """Wait for news of an engine, through all of its deaths."""
        while True:
            try:
                engine.facts = await engine.port.ready()
                self._decide()
                while True:
                    self._take(engine, await engine.port.news())
            except WorkerDied:
                self._take_back(engine)

    def _take(self, engine: "_Engine", news: Iterable[News]) -> None:
        for item in news:
            if isinstance(item, Finished):
                asked = engine.in_hand.pop(item.sample.request_id, None)
                if asked is not None:
                    sample = replace(item.sample, request_id=asked.request.request_id)
                    made = Generated(sample=sample, worker=engine.port.name, start=item.start, end=item.end)
                    asked.job.stream.put(item.sample.request_id, made)
                continue
            for request_id in item.request_ids:
                if (asked := engine.in_hand.pop(request_id, None)) is not None:
                    asked.job.stream.put(request_id, item.error)
        self._decide()

    def _take_back(self, engine: "_Engine") -> None:
        """Put what a dead engine had before all that has arrived."""
        engine.facts = None
        engine.life += 1
        self._arrived.extendleft(reversed(engine.take_back()))
        self._decide()

    def _decide(self) -> None:
        """Plan where jobs go, and give the engines what they have room for."""
        engines = [engine for engine in self._engines if engine.facts is not None]
        if not engines:
            return
        if self._arrived:
            self._plan(engines)
        for engine in engines:
            if parcels := engine.take_planned():
                self._do(self._give(engine, engine.life, parcels))

    def _plan(self, engines: Sequence["_Engine"]) -> None:
        jobs, self._arrived = list(self._arrived), deque()
        placement = self._policy.place([job.planned for job in jobs], [engine.state for engine in engines])
        for engine, places in zip(engines, placement.of, strict=True):
            engine.planned.extend(jobs[place] for place in places)
        self._arrived.extend(jobs[place] for place in placement.later)

    async def _give(self, engine: "_Engine", life: int, parcels: Sequence[Parcel]) -> None:
        async with engine.turn:  # in the order of the decisions
            if engine.life == life:
                with suppress(WorkerDied):  # `_tend` meets the death, too
                    await engine.port.give(parcels)

    async def _close(self, stream: "GeneratedStream") -> None:
        """End all that `stream` has not yielded."""
        self._streams.discard(stream)
        self._arrived = deque(job for job in self._arrived if job.stream is not stream)
        await asyncio.gather(*(self._drop(engine, stream) for engine in self._engines))
        self._decide()

    async def _drop(self, engine: "_Engine", stream: "GeneratedStream") -> None:
        engine.planned = deque(job for job in engine.planned if job.stream is not stream)
        dropped = [request_id for request_id, asked in engine.in_hand.items() if asked.job.stream is stream]
        for request_id in dropped:
            del engine.in_hand[request_id]
        if dropped:
            life = engine.life
            async with engine.turn:
                if engine.life == life:
                    with suppress(WorkerDied):
                        await engine.port.drop(dropped)

    def _do(self, work: Coroutine[None, None, None]) -> None:
        """Run something beside; its error ends `run`."""
        task = asyncio.create_task(work)
        self._work.add(task)
        task.add_done_callback(self._on_done)

    def _on_done(self, task: "asyncio.Task[None]") -> None:
        self._work.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            assert self._failed is not None
            if not self._failed.done():
                self._failed.set_exception(error)


@dataclass(eq=False, slots=True, kw_only=True)
class _Job:
    """Requests of one group, of one call of `generate`."""

    stream: "GeneratedStream"
    requests: dict[int, Request]
    """Those that no engine has and that have not ended, by the service's own ids."""
    version: WeightVersion
    step: int | None

    @property
    def planned(self) -> Planned:
        """As a policy sees it."""
        first = next(iter(self.requests.values()))
        return Planned(
            group=first.group_id,
            samples=len(self.requests),
            prompt_tokens=len(first.prompt_ids),
            expected_tokens=1.0,
        )


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request that an engine has."""

    job: _Job
    request: Request


@dataclass(eq=False, slots=True)
class _Engine:
    """An engine, what is planned for it, and what it has."""

    port: EnginePort
    facts: EngineFacts | None = None
    """None while it is not there."""
    planned: deque[_Job] = field(default_factory=deque)
    """In the order of their start."""
    in_hand: dict[int, _Asked] = field(default_factory=dict)
    """What it was given and has not finished."""
    life: int = 0
    """Its deaths so far."""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while it is given something, or drops it."""

    @property
    def room(self) -> float:
        """The number of requests that it can still be given."""
        assert self.facts is not None
        return math.inf if self.facts.room is None else self.facts.room - len(self.in_hand)

    @property
    def state(self) -> EngineState:
        """As a policy sees it."""
        assert self.facts is not None
        return EngineState(
            name=self.port.name,
            times=_UNKNOWN,
            slots=_ANY if self.facts.room is None else self.facts.room,
            cache_tokens=_ANY,
            running=[(0, 1)] * len(self.in_hand),
        )

    def take_planned(self) -> list[Parcel]:
        """Take from what is planned as much as it has room for; an engine without any work takes any job."""
        taken: list[tuple[_Job, list[Request]]] = []
        while self.planned and (len(self.planned[0].requests) <= self.room or not self.in_hand):
            job = self.planned.popleft()
            self.in_hand |= {request_id: _Asked(job, request) for request_id, request in job.requests.items()}
            taken.append((job, [replace(request, request_id=own) for own, request in job.requests.items()]))
            job.requests.clear()
        return list(_parcels(taken))

    def take_back(self) -> list[_Job]:
        """Take all that it has, and all that is planned for it, in the order of arrival."""
        jobs = {id(asked.job): asked.job for asked in self.in_hand.values()}
        for request_id, asked in self.in_hand.items():
            asked.job.requests[request_id] = asked.request
        self.in_hand.clear()
        planned, self.planned = self.planned, deque()
        return [*jobs.values(), *planned]


def _parcels(jobs: Iterable[tuple[_Job, list[Request]]]) -> Iterator[Parcel]:
    """Put jobs of one training step together. All others are by themselves, so that each is refused for itself."""

    def together(taken: tuple[_Job, list[Request]]) -> tuple[int, WeightVersion, int | None]:
        job, _ = taken
        return id(job if job.step is None else job.stream), job.version, job.step

    for (_, version, step), same in itertools.groupby(jobs, key=together):
        requests = tuple(request for _, own in same for request in own)
        yield Parcel(requests=requests, version=version, step=step)


class GeneratedStream(AsyncIterator[Generated]):
    """The samples of one `generate`, as they finish."""

    def __init__(self, service: GenerationService) -> None:
        self.pending: set[int] = set()
        """The service's ids of what has not ended."""
        self._service = service
        self._ended: deque[Generated | RequestError] = deque()
        self._failure: EngineError | None = None
        self._closed = False
        self._news = asyncio.Event()

    def put(self, request_id: int, ended: Generated | RequestError) -> None:
        """Note the end of a request."""
        self.pending.discard(request_id)
        self._ended.append(ended)
        self._news.set()

    def fail(self, failure: EngineError) -> None:
        """End with an error, after what has ended."""
        self._failure = failure
        self._news.set()

    async def __anext__(self) -> Generated:
        while not self._closed:
            if self._ended:
                ended = self._ended.popleft()
                if isinstance(ended, RequestError):
                    raise ended
                return ended
            if not self.pending:
                break
            if self._failure is not None:
                raise self._failure
            self._news.clear()
            await self._news.wait()
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """End what has not been yielded. A second call is harmless."""
        if not self._closed:
            self._closed = True
            self._news.set()
            await self._service._close(self)


class NewestGenerator:
    """See `GenerationService.newest`."""

    def __init__(self, service: GenerationService, version: Callable[[], WeightVersion]) -> None:
        self._service = service
        self._version = version

    def submit(self, requests: Sequence[Request]) -> SampleStream:
        """See `Engine.submit`; every error comes from the stream."""
        return _Samples(self._service.generate(requests, version=self._version()))


class _Samples(SampleStream):
    """The samples of a stream, without where they were made."""

    def __init__(self, stream: GeneratedStream) -> None:
        self._stream = stream

    async def __anext__(self) -> Sample:
        return (await anext(self._stream)).sample

    async def aclose(self) -> None:
        await self._stream.aclose()
