"""The rollout worker: an engine that generates for the queue's rows, with weights that arrive meanwhile.

queue ──claims──▶ RolloutTask ──▶ engine ──samples──▶ queue
trainer ──weights──▶ WeightReceiver ──▶ EngineUpdater ──▶ engine
"""

from collections.abc import Sequence
from contextlib import aclosing

from tailrace.config.run import RunConfig
from tailrace.engine.checks import check_context, check_engine
from tailrace.engine.factory import make_backend
from tailrace.engine.opening import open_engine
from tailrace.models.tokenizer import ResponseText, load_tokenizer
from tailrace.run.workers.base import RunWorker
from tailrace.run.workers.weights import listen_at
from tailrace.tasks.base import Service
from tailrace.tasks.context import Generation
from tailrace.tasks.updater import EngineUpdater
from tailrace.transfer.weights.receiver import WeightReceiver
from tailrace.types import Request, Sample, WeightVersion


def rows_in_hand(config: RunConfig) -> int:
    """The most rows that a rollout worker claims: as many as its engine runs at a time, and one more group.

    Where the engine does not say how many it runs: a worker's share of a training step.
    """
    group = config.algorithm.group_size
    capacity = make_backend(config.engine).capacity
    return config.groups_per_claim * group if capacity is None else capacity + group


class RolloutWorker(RunWorker):
    """A worker that generates."""

    async def start(self) -> None:
        """Load the engine with the initial weights."""
        config = self.config
        assert self.settings.weights is not None
        check_engine(config.engine, self.model_dir, device=config.device)
        executor = self.executor.during("generation")
        self._engine = await open_engine(config.engine, self.model_dir, device=config.device, executor=executor)
        self.stack.push_async_callback(self._engine.close)
        self._engine.log_to(self.log)
        self.activity.divide("generation", self._engine.take_seconds)
        self.memory.add(self._engine.memory)
        check_context(self._engine, longest_prompt=self.settings.longest_prompt)
        tokenizer = load_tokenizer(self.model_dir)
        receiver = WeightReceiver(
            self.settings.weights,
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
        decode = ResponseText(tokenizer, self.model_dir, config.sampling)
        room = rows_in_hand(config)
        self.tasks.generation = Generation(engine=self._engine, decode=decode, gate=self._updater, room=room)

    def background(self) -> Sequence[Service]:
        """The service that installs new weights."""
        return (self._updater,)

    async def generate(self, requests: Sequence[Request], version: WeightVersion) -> list[Sample]:
        """Generate samples beside those of the queue, with weights of `version` or newer."""
        async with self._updater.generating(version), aclosing(self._engine.submit(requests)) as samples:
            return [sample async for sample in samples]
