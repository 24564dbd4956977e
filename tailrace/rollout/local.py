"""The port of an engine in this process. A worker process has one, too, and the driver calls its methods from afar."""

import asyncio
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import replace

from tailrace.activity import Activity
from tailrace.engine.base import Engine, SampleStream
from tailrace.errors import EngineError, RequestError
from tailrace.events import Event, EventLog
from tailrace.registers.events import EventKind
from tailrace.rollout.base import EngineFacts, EnginePort, Finished, Leaving, News, Parcel, Refused
from tailrace.rollout.gate import OpenGate, WeightsGate
from tailrace.transfer.queue.holding import VOID
from tailrace.types import FinishReason, Piece, Request, Sample

Submit = Callable[[Sequence[Request]], SampleStream]


class LocalPort(EnginePort):
    """Hands requests to an engine once the gate lets them through, and keeps their samples until they are taken."""

    def __init__(
        self,
        engine: Engine,
        facts: EngineFacts,
        *,
        log: EventLog,
        activity: Activity,
        gate: WeightsGate | None = None,
        submit: Submit | None = None,
        name: str = "",
    ) -> None:
        """`gate`: by default one that is open. `submit`: stands in for `engine.submit`, as a replay does.

        `activity`: counts the time without any request as waiting for data. `name`: see `EnginePort`.
        """
        self.name = name
        self._engine = engine
        self._facts = facts
        self._log = log
        self._activity = activity
        self._gate = gate or OpenGate()
        self._submit = submit or engine.submit
        self._open: dict[asyncio.Task[None], _Open] = {}
        self._news: list[News | BaseException] = []
        self._has_news = asyncio.Event()
        engine.follow(self._see)
        self._waiting = ExitStack()
        self._waiting.enter_context(activity.waiting("data"))

    async def ready(self) -> EngineFacts:
        """See `EnginePort`."""
        return self._facts

    async def give(self, parcels: Sequence[Parcel]) -> None:
        """See `EnginePort`."""
        for parcel in parcels:
            self._waiting.close()
            task = asyncio.create_task(self._generate(opened := _Open(parcel)))
            self._open[task] = opened
            task.add_done_callback(self._on_end)

    async def news(self) -> list[News]:
        """See `EnginePort`."""
        while not self._news:
            self._has_news.clear()
            await self._has_news.wait()
        for item in self._news:
            if isinstance(item, BaseException):
                raise item
        news: list[News] = [item for item in self._news if not isinstance(item, BaseException)]
        self._news.clear()
        if all(isinstance(item, Piece) for item in news):
            return news  # of every step: nothing is decided by them, and to tell the load takes a fit
        load = self._engine.load()
        return news if load is None else [*news, load]

    def leave(self) -> None:
        """Tell the service that the engine ends soon."""
        self._tell(Leaving())

    async def withdraw(self, request_ids: Collection[int], *, with_cache: bool = False) -> None:
        """See `EnginePort`."""
        for opened in self._open.values():
            if not opened.has_begun:
                for request_id in opened.requests.keys() & set(request_ids):
                    request = opened.requests.pop(request_id)
                    now = self._log.now()
                    sample = _nothing(request if with_cache else request.without_cache())
                    self._tell(Finished(sample=sample, start=now, end=now))
        await (self._engine.withdraw(request_ids) if with_cache else self._engine.abort(request_ids))

    async def drop(self, request_ids: Collection[int]) -> None:
        """See `EnginePort`."""
        dropped = [task for task, opened in self._open.items() if not opened.requests.keys().isdisjoint(request_ids)]
        for task in dropped:
            self._open[task].dropped = True
            task.cancel()
        if dropped:
            await asyncio.wait(dropped)

    async def close(self) -> None:
        """End all requests."""
        await self.drop([request_id for opened in self._open.values() for request_id in opened.requests])
        self._waiting.close()

    def _on_end(self, task: asyncio.Task[None]) -> None:
        del self._open[task]
        if not self._open:
            self._waiting.enter_context(self._activity.waiting("data"))
        if not task.cancelled() and (error := task.exception()) is not None:
            self._tell(error)

    def _see(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            self._tell(piece)

    def _tell(self, item: News | BaseException) -> None:
        self._news.append(item)
        self._has_news.set()

    async def _generate(self, opened: "_Open") -> None:
        parcel = opened.parcel
        async with self._gate.generating(parcel.version):
            if not opened.requests:
                return
            event = Event(
                task=EventKind.ROLLOUT,
                actor="rollout",
                start=self._log.now(),
                end=0.0,
                step=parcel.step,
                samples=len(opened.requests),
                tokens=0,
                version=self._engine.stats().version,
            )
            try:
                await self._stream(opened, event)
            except asyncio.CancelledError:
                if not opened.dropped:
                    raise
                event.info = VOID
            except RequestError as error:
                self._tell(Refused(request_ids=tuple(opened.requests), error=error))
                return
            if parcel.step is not None:
                event.end = self._log.now()
                self._log.emit(event)

    async def _stream(self, opened: "_Open", event: Event) -> None:
        """Tell of each sample as it finishes. `event` gets the number of tokens."""
        async with aclosing(self._submit(opened.begin())) as samples:
            async for sample in samples:
                request = opened.take(sample)
                assert event.tokens is not None
                before = 0 if request.begun is None else len(request.begun.response_ids)
                event.tokens += len(sample.response_ids) - before
                self._tell(Finished(sample=sample, start=event.start, end=self._log.now()))
        if opened.requests:
            raise EngineError(
                f"the engine ended its stream without samples of {len(opened.requests)} of "
                f"{len(opened.parcel.requests)} requests; `submit` gives one of each, or raises an error"
            )


class _Open:
    """A parcel that has not ended."""

    def __init__(self, parcel: Parcel) -> None:
        self.parcel = parcel
        self.requests = {request.request_id: request for request in parcel.requests}
        """What has not finished."""
        self.has_begun = False
        """Whether the engine has them."""
        self.dropped = False

    def begin(self) -> tuple[Request, ...]:
        """Return what the engine gets. From then on it alone has the keys and values that came along."""
        requests = tuple(self.requests.values())
        self.requests = {request.request_id: request.without_cache() for request in requests}
        self.parcel = replace(self.parcel, requests=tuple(self.requests.values()))
        self.has_begun = True
        return requests

    def take(self, sample: Sample) -> Request:
        """Note that a request has finished, and return it.

        Raises:
            EngineError: it is not one of these, or has finished before.
        """
        request = self.requests.pop(sample.request_id, None)
        if request is None:
            raise EngineError(
                f"the engine gave a sample of request {sample.request_id} that it was not asked for, or twice"
            )
        return request


def _nothing(request: Request) -> Sample:
    """What a request has that was not begun here."""
    return request.begun or Sample.of(request, [], [], [], FinishReason.ABORT)
