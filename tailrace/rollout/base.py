"""The port of an engine: the service's end of it, in whatever process the engine is.

    service ──give: parcels of requests──▶ port ──gate: weights of the parcel's version──▶ engine
            ◀──news: finished samples───── port ◀───────────────────────────────────────── engine
            ──withdraw: requests that go on elsewhere, drop: those that no one waits for──▶

Waiting: `give` and `drop` never wait for a response. `news` waits until there is some, without a limit of its own: it
ends when the engine's process dies.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from tailrace.engine.base import EngineLoad
from tailrace.errors import RequestError
from tailrace.types import CacheForm, Piece, Request, Sample, WeightVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What the service knows of an engine, from the time at which it is ready."""

    room: int | None = None
    """The most requests that it is given at a time; None for any number."""
    continues: bool = False
    """See `Engine.continues`."""
    cache: CacheForm | None = None
    """See `Engine.cache_form`."""
    datacentre: str = ""
    """Where it is; empty where that is not told."""
    model: str = ""
    """The shape of its model, with the number of tokens: see `ModelInfo.kind`. Empty where it is not told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """Requests that an engine is given together, all or none."""

    requests: tuple[Request, ...]
    """Their ids are unique for as long as the service lives."""
    version: WeightVersion
    """The weights that begin them are of this version or newer."""
    step: int | None = None
    """The training step that they are for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A sample that has ended."""

    sample: Sample
    start: float
    """When its engine got it, after the gate, in seconds since the start of the run."""
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """Requests that the engine cannot serve."""

    request_ids: tuple[int, ...]
    error: RequestError


@dataclass(frozen=True, slots=True)
class Leaving:
    """The engine's machine ends soon."""


News = Finished | Refused | Leaving | Piece | EngineLoad
"""The last is the engine's load at the time of the news, where it tells."""


class EnginePort(ABC):
    """An engine as the service uses it."""

    name: str
    """The worker of the engine; empty where it is in the process of the run."""

    @abstractmethod
    async def ready(self) -> EngineFacts:
        """Wait until the engine can be given requests: it has been started, or started again after a death.

        Raises:
            ClusterError: it does not come.
        """

    @abstractmethod
    async def give(self, parcels: Sequence[Parcel]) -> None:
        """Hand requests over; their samples come as news.

        Raises:
            WorkerDied: the engine has died since it was ready. All that it had is lost.
        """

    @abstractmethod
    async def news(self) -> list[News]:
        """Wait for news, and return all that there is.

        Raises:
            WorkerDied: see `give`.
            TailraceError: the engine has failed, or weights have not come in time.
        """

    @abstractmethod
    async def withdraw(self, request_ids: Collection[int], *, with_cache: bool = False) -> None:
        """End these requests now. What each has so far comes as news, with the finish reason ABORT.

        What finishes meanwhile comes as finished. Unknown ids are ignored.

        Args:
            request_ids: those of some requests.
            with_cache: whether their keys and values come along, where the engine gives them out.

        Raises:
            WorkerDied: see `give`.
        """

    @abstractmethod
    async def drop(self, request_ids: Collection[int]) -> None:
        """End these requests, and forget them. Return when the engine has. Unknown ids are ignored.

        Args:
            request_ids: whole parcels, less what has finished.

        Raises:
            WorkerDied: see `give`.
        """
