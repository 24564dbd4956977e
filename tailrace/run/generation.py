"""The generation of a run: the service in front of its engines, and the task that has responses made for rows.

queue ◀──▶ RolloutTask ──▶ GenerationService ──▶ LocalPort (colocated), or a RemotePort for each rollout worker
"""

import asyncio
from collections.abc import Collection, Sequence

from tailrace.algorithms.factory import make_algorithm
from tailrace.algorithms.table import Generate
from tailrace.cluster.pool import Pool, PooledWorker
from tailrace.config.run import RunConfig
from tailrace.config.weights import ONE_VERSION
from tailrace.events import Event, EventLog
from tailrace.planning.dispatch.factory import make_policy
from tailrace.planning.dispatch.moving import Way
from tailrace.planning.lengths.base import LengthPredictor
from tailrace.planning.remaining import LengthHistory
from tailrace.registers.events import EventKind
from tailrace.rollout.base import EngineFacts, EnginePort, News, Parcel
from tailrace.rollout.foresight import Foresight
from tailrace.rollout.service import GenerationService
from tailrace.tasks.base import Service
from tailrace.tasks.context import Decode
from tailrace.tasks.rollout import RolloutTask
from tailrace.transfer.queue.base import TransferQueue


class RemotePort(EnginePort):
    """The engine of a rollout worker."""

    def __init__(self, pool: Pool, index: int, name: str) -> None:
        self.name = name
        self._pool = pool
        self._index = index
        self._worker: PooledWorker

    async def ready(self) -> EngineFacts:
        """See `EnginePort`."""
        self._worker = await self._pool.worker(self._index)
        facts: EngineFacts = await self._worker.call("ready")
        return facts

    async def give(self, parcels: Sequence[Parcel]) -> None:
        """See `EnginePort`."""
        await self._worker.call("give", parcels)

    async def news(self) -> list[News]:
        """See `EnginePort`."""
        news: list[News] = await self._worker.call("news")
        return news

    async def withdraw(self, request_ids: Collection[int], *, with_cache: bool = False) -> None:
        """See `EnginePort`."""
        await self._worker.call("withdraw", tuple(request_ids), with_cache)

    async def drop(self, request_ids: Collection[int]) -> None:
        """See `EnginePort`."""
        await self._worker.call("drop", tuple(request_ids))


class Generation:
    """Generates for the rows of a queue, until that is closed."""

    def __init__(
        self,
        config: RunConfig,
        ports: Sequence[EnginePort],
        queue: TransferQueue,
        decode: Decode,
        log: EventLog,
        *,
        lengths: LengthPredictor | None = None,
        model: str = "",
    ) -> None:
        """`lengths`: expects the lengths of responses, where the recipe says so. `model`: that of the run; see
        `GenerationService`.
        """
        history = LengthHistory()
        policy = make_policy(config.rollout.dispatch, history, seed=config.seed)
        foresight = None
        if lengths is not None:
            foresight = Foresight(
                lengths,
                policy,
                config.rollout.dispatch,
                history,
                log,
                samples_per_step=config.trainer.train_batch_size,
                max_staleness=config.pipeline.max_staleness,
            )
        self.service = GenerationService(
            ports,
            policy,
            foresight=foresight,
            order=config.rollout.order,
            model=model,
            one_version=config.weights.mode in ONE_VERSION,
        )
        self.service.on_move = self._tell_move
        self._log = log
        self._beside: list[Service] = [self.service]
        (name,) = (task.name for task in make_algorithm(config.algorithm).tasks if isinstance(task.work, Generate))
        self._task = RolloutTask(queue, name, self.service, decode, log, config)

    def _tell_move(self, source: str, target: str, way: Way) -> None:
        now, info = self._log.now(), {"source": source, "target": target, "way": way}
        self._log.emit(Event(task=EventKind.MOVE, actor="rollout", start=now, end=now, samples=1, info=info))

    def serve_beside(self, service: Service) -> None:
        """Run this for as long as rows are generated."""
        self._beside.append(service)

    async def run(self) -> None:
        """See `Service`."""
        async with asyncio.TaskGroup() as tasks:
            endless = [tasks.create_task(service.run()) for service in self._beside]
            await self._task.run()
            for task in endless:
                task.cancel()
