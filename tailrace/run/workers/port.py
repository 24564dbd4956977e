"""The commands by which a driver uses the engine of a worker: those of `EnginePort`."""

from collections.abc import Collection, Sequence

from tailrace.cluster.base import Worker
from tailrace.rollout.base import EngineFacts, News, Parcel
from tailrace.rollout.local import LocalPort


class PortWorker(Worker):
    """A worker with an engine, whose port it makes when it is opened."""

    _port: LocalPort

    async def ready(self) -> EngineFacts:
        """See `EnginePort`."""
        return await self._port.ready()

    async def give(self, parcels: Sequence[Parcel]) -> None:
        """See `EnginePort`."""
        await self._port.give(parcels)

    async def news(self) -> list[News]:
        """See `EnginePort`."""
        return await self._port.news()

    async def withdraw(self, request_ids: Collection[int], with_cache: bool) -> None:
        """See `EnginePort`."""
        await self._port.withdraw(request_ids, with_cache=with_cache)

    async def drop(self, request_ids: Collection[int]) -> None:
        """See `EnginePort`."""
        await self._port.drop(request_ids)
