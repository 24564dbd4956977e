"""A run whose tasks are in worker processes: the driver's side.

    driver                                        workers
    Pipeline ──train, save, export──▶ RemoteLearner ──────▶ trainer
             ──prompts──────────────▶ Generation ─────────▶ rollout-0, rollout-1, …, of all rollout pools
             ──run──────────────────▶ Pools: events, deaths, replacements
    prompts ─────────────────────────────────────────────▶ transfer queue ◀──▶ all workers
                                                            trainer ──weights──▶ rollout workers

Waiting: the driver waits for its calls, and a call waits for its worker; it ends at once when the worker dies. A worker
that dies is replaced, and its claimed rows are ready again at once. The trainer is not replaced: the weights that the
rows in the queue belong to are lost with it, so the run goes on from its last checkpoint.
"""

import asyncio
import logging
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from tailrace.algorithms.factory import make_run_algorithm
from tailrace.algorithms.table import Grade
from tailrace.cluster.base import Cluster, WorkerHandle, WorkerSpec, each
from tailrace.cluster.factory import make_cluster
from tailrace.cluster.pool import DeathBudget, Pool, nothing
from tailrace.config.cluster import ROLLOUT, PoolConfig, pool_in_table
from tailrace.config.rewards import ModelReward
from tailrace.config.run import RunConfig
from tailrace.errors import TailraceError, first_error
from tailrace.events import EventLog
from tailrace.report.workers import kind_of
from tailrace.rewards.answers import check_answers
from tailrace.rewards.graders import Graders
from tailrace.rollout.base import EnginePort
from tailrace.run.checkpoint import RunState
from tailrace.run.control import control
from tailrace.run.endpoint import endpoint
from tailrace.run.fleet import Fleet
from tailrace.run.generation import Generation, RemotePort
from tailrace.run.inputs import Inputs
from tailrace.run.learner import Learner, ModelLearner
from tailrace.run.observer import Observer
from tailrace.run.parts import Placement, evaluated, make_evaluator, make_pipeline
from tailrace.run.pipeline import Pipeline
from tailrace.run.queue import OpenQueue
from tailrace.run.worker_graders import WorkerGraders
from tailrace.run.workers.pools import factory_of, run_pools
from tailrace.run.workers.settings import RunSettings
from tailrace.tasks.base import Service
from tailrace.trainer.checkpoint import CheckpointStore
from tailrace.transfer.queue.client.remote import RemoteQueue
from tailrace.transfer.weights.address import WeightsAddress

_log = logging.getLogger(__name__)


class RemoteLearner(Learner):
    """The driver's interface to the learner in the trainer worker."""

    def __init__(self, trainer: Pool) -> None:
        self._trainer = trainer
        self._trained_steps = 0
        self._kl_coefficient = 0.0

    @property
    def trained_steps(self) -> int:
        """The number of trained steps as of the last call that returned; see `Learner`."""
        return self._trained_steps

    @property
    def kl_coefficient(self) -> float:
        """The coefficient as of the last step that this trained; see `Learner`."""
        return self._kl_coefficient

    async def train(self, step: int) -> None:
        """See `Learner`."""
        self._trained_steps, self._kl_coefficient = await self._call("train", step)

    async def hold(self) -> None:
        """See `Learner`."""
        await self._call("hold")

    async def release(self) -> None:
        """See `Learner`."""
        await self._call("release")

    async def save(self, next_step: int, staged: Path | None = None) -> None:
        """See `Learner`."""
        await self._call("save", next_step, None if staged is None else str(staged.resolve()))

    async def restore(self, checkpoint: Path, state: RunState) -> None:
        """See `Learner`."""
        await self._call("restore", str(checkpoint), state)
        self._trained_steps = state.trained_steps

    async def export(self, directory: Path) -> None:
        """See `Learner`."""
        await self._call("export", str(directory))

    async def evidence(self) -> dict[str, Any]:
        """See `Learner`."""
        return dict(await self._call("evidence"))

    async def _call(self, method: str, *args: Any) -> Any:
        return await self._trainer.call(0, method, *args)


class RemoteModelLearner(ModelLearner):
    """The driver's interface to the learner of a model other than the policy, in its worker."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    async def evidence(self) -> dict[str, Any]:
        """See `ModelLearner`."""
        return dict(await self._pool.call(0, "evidence"))

    async def train(self, step: int) -> None:
        """See `ModelLearner`."""
        await self._pool.call(0, "train", step)

    async def save(self, directory: Path) -> None:
        """See `ModelLearner`."""
        await self._pool.call(0, "save", str(directory.resolve()))

    async def restore(self, directory: Path) -> None:
        """See `ModelLearner`."""
        await self._pool.call(0, "restore", str(directory.resolve()))


class Separated(Placement):
    """A placement with worker processes for each kind of task."""

    def __init__(self, config: RunConfig, inputs: Inputs, budget: DeathBudget) -> None:
        """`budget`: the allowed deaths in all attempts at the run."""
        self._config = config
        self._inputs = inputs
        self._budget = budget
        self._pools = run_pools(config)
        self._cluster = make_cluster(config.cluster, self._pools)

    async def open(self, stack: AsyncExitStack) -> None:
        """Check that the grader and the answers fit, and that the cluster has what the workers need."""
        if self._config.pipeline.replay is None:  # otherwise nothing is graded
            await check_answers(self._config.rewards, self._inputs.prompts.by_source)
        address = self._config.cluster.address
        _log.info(f"joining the Ray cluster {address}" if address else "starting a Ray on this machine")
        await stack.enter_async_context(self._cluster)
        pools = ", ".join(f"{name} × {pool.workers}" for name, pool in self._pools.items())
        _log.info(f"starting the queue, then workers, each of which loads what it needs: {pools}")

    async def connect(self, queue: OpenQueue, store: CheckpointStore, log: EventLog, stack: AsyncExitStack) -> Pipeline:
        """Start all workers."""
        config, directory = self._config, store.directory
        pools = Workers(config, self._inputs, self._pools, self._cluster, queue, directory, log, self._budget)
        await stack.enter_async_context(pools)
        await pools.start()
        learner = RemoteLearner(pools.trainer)
        generation = Generation(
            config,
            pools.engines(),
            queue.queue,
            self._inputs.decode,
            log,
            lengths=self._inputs.lengths,
            model=self._inputs.model_kind,
        )
        fleet = Fleet(config.cluster.rollout, pools, generation.service, log)
        generation.serve_beside(fleet)
        await stack.enter_async_context(control(Path(config.output_dir), fleet.scale))
        if (http := config.rollout.http) is not None:
            serving = endpoint(
                http,
                generation.service,
                self._inputs.model_dir,
                self._inputs.decode,
                lambda: learner.trained_steps,
                Path(config.output_dir),
            )
            await stack.enter_async_context(serving)
        evaluator = None
        if evaluated(config, self._inputs):
            graders = await stack.enter_async_context(Graders(config.rewards, pools.graders()))
            engines = generation.service.newest(lambda: learner.trained_steps)
            evaluator = make_evaluator(config, self._inputs, engines, graders, log, actor="driver")
        services: list[Service] = [*pools.services, generation, Observer(queue.queue, log)]
        models = pools.models()
        return make_pipeline(config, self._inputs, queue.queue, services, learner, evaluator, store, models)


class Workers:
    """The workers of one attempt at a run."""

    def __init__(
        self,
        config: RunConfig,
        inputs: Inputs,
        pools: Mapping[str, PoolConfig],
        cluster: Cluster,
        queue: OpenQueue,
        checkpoints: Path,
        log: EventLog,
        budget: DeathBudget,
        *,
        longest_prompt: int | None = None,
    ) -> None:
        """`pools`: those to start, by name. `checkpoints`: the run's directory of checkpoints.

        `longest_prompt`: the most tokens that a prompt for the engines has; by default of the longest in `inputs`.
        """
        assert queue.address is not None
        assert isinstance(queue.queue, RemoteQueue)
        self._config = config
        self._cluster = cluster
        self._queue = queue.queue
        self._log = log
        self._budget = budget
        self._settings = RunSettings(
            config=config.model_dump_json(),
            model_dir=str(inputs.model_dir.resolve()),
            queue=queue.address,
            origin=log.origin,
            prompts=inputs.prompts.fingerprint,
            longest_prompt=longest_prompt or inputs.longest_prompt,
            checkpoints=str(checkpoints.resolve()),
        )
        self._weights: asyncio.Future[WeightsAddress] = asyncio.get_running_loop().create_future()
        """The address that sends weights to the rollout workers."""
        self._configs = pools
        self._algorithm = make_run_algorithm(config)
        self._trained = {task.pool for task, _ in self._algorithm.trained()}
        self._pools: dict[str, Pool] = {}
        """By kind: the workers of all rollout pools are together."""

    @property
    def trainer(self) -> Pool:
        """The pool of the one trainer worker."""
        return self._pools["trainer"]

    @property
    def rollout(self) -> Pool:
        """The pool of the workers with engines."""
        return self._pools[ROLLOUT]

    def engines(self) -> list[EnginePort]:
        """The ports of the rollout workers' engines."""
        return [RemotePort(self.rollout, index, name) for index, name in enumerate(self.rollout.names)]

    def models(self) -> dict[str, ModelLearner]:
        """The learners of models other than the policy, by task."""
        return {task.name: RemoteModelLearner(self._pools[task.pool]) for task, _ in self._algorithm.other_models()}

    def graders(self) -> dict[str, WorkerGraders]:
        """Those that have a model, by the name of the reward; none where a trace is replayed."""
        if self._config.pipeline.replay is not None:
            return {}
        pools = {task.work.reward: task.pool for task in self._algorithm.tasks if isinstance(task.work, Grade)}
        each = self._config.rewards.each.items()
        models = [name for name, grading in each if name in pools and isinstance(grading.grader, ModelReward)]
        return {name: WorkerGraders(self._pools[pools[name]], name) for name in models}

    @property
    def services(self) -> list[Pool]:
        """All pools."""
        return list(self._pools.values())

    async def start(self, weights: WeightsAddress | None = None) -> None:
        """Start all workers at the same time, since each loads a model of its own.

        `weights`: the address that sends weights to the rollout workers; by default the trainer worker's.
        """
        if weights is not None:
            self._weights.set_result(weights)
        kinds = dict.fromkeys(map(pool_in_table, self._configs))
        self._pools = {kind: self._pool(kind) for kind in kinds}
        try:
            async with asyncio.TaskGroup() as starting:
                for pool in self._pools.values():
                    starting.create_task(pool.start())
        except BaseExceptionGroup as errors:
            raise first_error(errors) from errors

    async def check_room(self, engines: Mapping[str, int]) -> None:
        """Check that the cluster could hold so many rollout workers of each pool, beside those of other kinds.

        Raises: see `Cluster.check_room`.
        """
        pools = dict(self._configs)
        for name in self._config.cluster.rollout.each:
            pools[name] = self._configs[name].model_copy(update={"workers": engines.get(name, 0)})
        await self._cluster.check_room(pools)

    async def add_engine(self, pool: str) -> EnginePort:
        """Start one more worker of a rollout pool.

        Raises: see `Pool.add`.
        """
        number = sum(kind_of(name) == pool for name in self.rollout.names)
        spec = self._spec(pool, number)
        return RemotePort(self.rollout, await self.rollout.add(spec), spec.name)

    async def remove_engine(self, name: str) -> None:
        """Close a rollout worker, which has nothing left to do.

        Raises: see `Pool.remove`.
        """
        await self.rollout.remove(self.rollout.names.index(name))

    async def close(self) -> None:
        """Close all workers.

        Raises: the first error, when all have ended; see `Pool.close`.
        """
        await each(*(pool.close() for pool in self._pools.values()))

    async def __aenter__(self) -> Self:
        """Return itself."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close all workers. After an error of the block, errors of closing are only logged: a run may go on."""
        try:
            await self.close()
        except TailraceError as failure:
            if error is None:
                raise
            _log.warning("not all workers could be closed: %s", failure)

    def _pool(self, kind: str) -> Pool:
        """Make the workers of a kind. A model is trained by one worker, which is not replaced."""
        return Pool(
            self._cluster,
            [
                self._spec(name, number)
                for name, pool in self._configs.items()
                if pool_in_table(name) == kind
                for number in range(pool.workers)
            ],
            self._config.cluster,
            self._log,
            budget=None if kind in self._trained else self._budget,
            on_start={"trainer": self._learn_weights_address, ROLLOUT: self._tell_weights_address}.get(kind, nothing),
            on_death=self._take_back,
        )

    def _spec(self, pool: str, number: int) -> WorkerSpec:
        return WorkerSpec(
            name=pool if pool in self._trained else f"{pool}-{number}",
            pool=self._configs[pool],
            factory=factory_of(self._algorithm, pool),
            settings=msgspec.structs.replace(self._settings, pool=pool).encode(),
        )

    async def _learn_weights_address(self, trainer: WorkerHandle) -> None:
        self._weights.set_result(await trainer.call("weights_address"))

    async def _tell_weights_address(self, rollout: WorkerHandle) -> None:
        address = await asyncio.shield(self._weights)  # which others wait for, too
        await rollout.call("receive_weights", address)

    async def _take_back(self, handle: WorkerHandle) -> None:
        """Give back the claims of a dead worker at once."""
        await self._queue.dismiss(handle.facts["queue_client"])
