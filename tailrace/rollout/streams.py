"""The streams of samples that the service gives."""

import asyncio
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from tailrace.engine.base import SampleStream
from tailrace.errors import EngineError, RequestError
from tailrace.types import Piece, Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """A sample, and where it was made."""

    sample: Sample
    worker: str
    """See `EnginePort.name`."""
    start: float
    """See `Finished`."""
    end: float


class GeneratedStream(AsyncIterator[Generated]):
    """The samples of one `GenerationService.generate`, as they finish."""

    def __init__(self, close: "Callable[[GeneratedStream], Awaitable[None]]") -> None:
        """`close`: ends what is pending."""
        self.pending: set[int] = set()
        """The service's ids of what has not ended."""
        self.wants_pieces = False
        """Whether `with_pieces` is used."""
        self._told: defaultdict[int, int] = defaultdict(int)
        """The number of tokens that pieces have told, by request."""
        self._close = close
        self._ended: deque[Generated | Piece | RequestError] = deque()
        self._failure: EngineError | None = None
        self._closed = False
        self._news = asyncio.Event()

    def put(self, request_id: int, ended: Generated | RequestError) -> None:
        """Note the end of a request."""
        self.pending.discard(request_id)
        self._ended.append(ended)
        self._news.set()

    def see(self, piece: Piece) -> None:
        """Note the newest tokens of a request that streams. What was told before, by an engine that died, is not told
        again; nor what comes after tokens that are not known, such as those of a response that has moved.
        """
        told, end = self._told[piece.request_id], piece.start + len(piece.tokens)
        if self.wants_pieces and piece.start <= told < end:
            known = told - piece.start
            new = replace(piece, start=told, tokens=piece.tokens[known:], log_probs=piece.log_probs[known:])
            self._ended.append(new)
            self._told[piece.request_id] = end
            self._news.set()

    def fail(self, failure: EngineError) -> None:
        """End with an error, after what has ended."""
        self._failure = failure
        self._news.set()

    async def with_pieces(self) -> AsyncIterator[Generated | Piece]:
        """Yield the newest tokens of requests that stream, too, where their engine tells them.

        Each token comes once at most, in order. Where an engine has died and the weights are others since, the sample
        may differ from the tokens that came before it.
        """
        with suppress(StopAsyncIteration):
            while True:
                yield await self._next()

    async def __anext__(self) -> Generated:
        while isinstance(item := await self._next(), Piece):
            pass
        return item

    async def _next(self) -> Generated | Piece:
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
            await self._close(self)


class Samples(SampleStream):
    """The samples of a stream, without where they were made."""

    def __init__(self, stream: GeneratedStream) -> None:
        self._stream = stream

    async def __anext__(self) -> Sample:
        return (await anext(self._stream)).sample

    async def aclose(self) -> None:
        """See `SampleStream`."""
        await self._stream.aclose()
