"""The rollout worker: an engine that generates for the driver's service, with weights that arrive meanwhile.

driver ──give, drop──▶ LocalPort ──▶ engine ──samples──▶ news ──▶ driver
trainer ──weights──▶ WeightReceiver ──▶ EngineUpdater ──▶ engine
"""

from collections.abc import Sequence

from tailrace.config.cluster import ROLLOUT
from tailrace.config.run import RunConfig
from tailrace.engine.checks import check_context, check_engine
from tailrace.engine.factory import make_backend
from tailrace.engine.opening import open_engine
from tailrace.models.info import describe_model
from tailrace.rollout.base import EngineFacts
from tailrace.rollout.local import LocalPort
from tailrace.rollout.updater import EngineUpdater
from tailrace.run.workers.base import RunWorker, UntilClosed
from tailrace.run.workers.port import PortWorker
from tailrace.run.workers.weights import listen_at
from tailrace.tasks.base import Service
from tailrace.tasks.replay import can_continue, load_replay, replaying
from tailrace.transfer.weights.address import WeightsAddress
from tailrace.transfer.weights.receiver import WeightReceiver


def rows_in_hand(config: RunConfig, pool: str = ROLLOUT) -> int:
    """The most requests that a worker of this pool has: as many as its engine runs at a time, and one more group.

    Where the engine does not say how many it runs: a worker's share of a training step.
    """
    group = config.algorithm.group_size
    capacity = make_backend(config.engines[pool]).capacity
    return config.groups_per_claim * group if capacity is None else capacity + group


class RolloutWorker(PortWorker, RunWorker):
    """A worker that generates."""

    _serves = False
    _noticed = False

    async def start(self) -> None:
        """Load the engine with the initial weights."""
        config = self.config
        pool = self.settings.pool
        engine = config.engines[pool]
        check_engine(engine, self.model_dir, device=config.device)
        executor = self.executor.during("generation")
        self._engine = await open_engine(engine, self.model_dir, device=config.device, executor=executor)
        self.stack.push_async_callback(self._engine.close)
        self._engine.log_to(self.log)
        self.activity.divide("generation", self._engine.take_seconds)
        self.memory.add(self._engine.memory)
        check_context(self._engine, longest_prompt=self.settings.longest_prompt)

    async def receive_weights(self, address: WeightsAddress) -> None:
        """Take new weights from `address`, and let the engine serve. The driver says so once, before anything else."""
        config = self.config
        receiver = WeightReceiver(
            address,
            name=self.context.name,
            datacentre=self.context.datacentre,
            listen=listen_at(config, self.context.address),
            medium=config.weights.medium,
            log=self.log,
        )
        self._updater = EngineUpdater(
            self._engine,
            self.stack.enter_context(receiver),
            config.weights_mode,
            log=self.log,
            activity=self.activity,
            timeout_s=config.weights.timeout_s,
        )
        replay = load_replay(config.pipeline.replay)
        self._port = LocalPort(
            self._engine,
            EngineFacts(
                room=rows_in_hand(config, self.settings.pool),
                continues=can_continue(self._engine, replay),
                cache=self._engine.cache_form,
                datacentre=self.context.datacentre,
                model=describe_model(self.model_dir).kind,
            ),
            log=self.log,
            activity=self.activity,
            gate=self._updater,
            submit=replaying(self._engine, self.activity, replay),
        )
        self.stack.push_async_callback(self._port.close)
        self._serves = True
        if self._noticed:
            self._port.leave()

    def background(self) -> Sequence[Service]:
        """The service that installs new weights."""
        return (self._updater,)

    def services(self) -> Sequence[Service]:
        """A service that waits until the queue is closed; the driver says what to generate."""
        return (UntilClosed(self.queue),)

    def notice(self) -> None:
        """See `Worker`. A notice that comes before the engine serves is passed on when it does."""
        self._noticed = True
        if self._serves:
            self._port.leave()
