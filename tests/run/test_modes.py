"""Asynchronous runs of a real model learn, resume, and equal a plain loop with delayed weights."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from tailrace.activity import Activity, TimedExecutor
from tailrace.algorithms.advantages import group_normalized
from tailrace.algorithms.factory import make_algorithm
from tailrace.config.run import RunConfig
from tailrace.engine.model.weights import Weights
from tailrace.events import Event, EventLog
from tailrace.host.compute import prepare_torch
from tailrace.prompts.order import PromptOrder, sample_seed
from tailrace.rollout.base import EngineFacts
from tailrace.rollout.gate import WeightsGate
from tailrace.rollout.local import LocalPort
from tailrace.rollout.updater import EngineUpdater
from tailrace.run.colocated import Parts, open_parts
from tailrace.run.generation import Generation
from tailrace.run.inputs import Inputs, load_inputs
from tailrace.run.parts import make_learner, make_pipeline
from tailrace.run.queue import open_queue, run_table
from tailrace.run.step_metrics import step_metrics
from tailrace.run.train import train
from tailrace.tasks.actor import StepResult
from tailrace.tasks.context import TaskContext
from tailrace.tasks.factory import make_services
from tailrace.tasks.memory import MemoryUse
from tailrace.trainer.base import TrainSample
from tailrace.trainer.checkpoint import CheckpointStore
from tailrace.types import Request, Sample, WeightVersion
from tests.conftest import TinyModel
from tests.helpers.graders import digit_fraction
from tests.helpers.runs import small_run, steps_of, write_prompts

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write_prompts(tmp_path / "prompts.jsonl")


class History:
    """The progress of a run: the weights of every version, and the rewards of every step."""

    def __init__(self) -> None:
        self.weights: list[Tensors] = []
        self.rewards: list[list[float]] = []

    def keep(self, weights: Weights) -> None:
        """Keep the weights of the next version."""
        self.weights.append({name: cast(torch.Tensor, tensor).detach().clone() for name, tensor in weights})


async def delayed_loop(config: RunConfig, inputs: Inputs, parts: Parts, stack: AsyncExitStack) -> History:
    """The reference: each step trains on responses of the weights that are `max_staleness` updates older."""
    history = History()
    history.keep(parts.trainer.weights())
    algorithm = make_algorithm(config.resolved_algorithm)
    for step in range(config.trainer.steps):
        version = max(0, step - config.pipeline.max_staleness)
        if version != parts.engine.stats().version:  # an update makes the engine forget its computed prefixes
            await parts.engine.update_weights(version, iter(history.weights[version].items()))
        samples = await generate(requests(step, config, inputs), parts)
        rewards = [digit_fraction(inputs.decode(s.response_ids.tolist()), None, "", {}) for s in samples]
        size = config.algorithm.group_size
        advantages = [
            advantage
            for start in range(0, len(rewards), size)
            for advantage in group_normalized(rewards[start : start + size], normalize_std=True, eps=1e-6)
        ]
        prompt_ids = [request.prompt_ids for request in requests(step, config, inputs)]
        batch = [
            TrainSample(
                group_id=sample.group_id,
                prompt_ids=prompt,
                response_ids=sample.response_ids,
                response_mask=np.ones(len(sample.response_ids), np.int64),
                columns={
                    "advantages": np.full(len(sample.response_ids), advantage, np.float32),
                    "rollout_log_probs": sample.rollout_log_probs,
                },
            )
            for sample, prompt, advantage in zip(samples, prompt_ids, advantages, strict=True)
        ]
        parts.trainer.accumulate(batch, algorithm.policy_task()[1].loss)
        parts.trainer.apply()
        history.rewards.append(rewards)
        history.keep(parts.trainer.weights())
    return history


async def generate(asked: list[Request], parts: Parts) -> list[Sample]:
    """The responses to `asked`, in the order of their rows."""
    async with aclosing(parts.engine.submit(asked)) as stream:
        return sorted([sample async for sample in stream], key=lambda sample: sample.request_id)


def requests(step: int, config: RunConfig, inputs: Inputs) -> list[Request]:
    """The requests for a step's rows. The id of each is the row's `order`."""
    order = PromptOrder(count=len(inputs.prompts.train), seed=config.seed, shuffle=config.prompts.shuffle)
    size, groups = config.algorithm.group_size, config.groups_per_step
    return [
        Request(
            request_id=position * size + sample,
            group_id=position,
            prompt_ids=inputs.prompts.train[order[position]].prompt_ids,
            sampling=config.sampling,
            seed=sample_seed(config.seed, position, sample),
        )
        for position in range(step * groups, (step + 1) * groups)
        for sample in range(size)
    ]


class JustInTime:
    """A source and publisher that bring each version when the last response before it is finished, and not before.

    Version v is for step v + staleness. So it comes once the step before that has all of its responses.
    """

    def __init__(self, history: History, weights: Callable[[], Weights], staleness: int, samples_per_step: int) -> None:
        self._history = history
        self._weights = weights
        self._staleness = staleness
        self._samples_per_step = samples_per_step
        self._finished = 0
        self._next: WeightVersion = 1
        self._changed = asyncio.Event()

    def saw(self, event: Event) -> None:
        """Count finished samples; this is a sink of events."""
        if event.task == "sample":
            self._finished += 1
            self._changed.set()

    async def publish(self, version: WeightVersion) -> None:
        assert len(self._history.weights) == version
        self._history.keep(self._weights())
        self._changed.set()

    async def settle(self, version: WeightVersion) -> None:
        """No engine is waited for."""

    async def announcement(self, version: int, *, timeout_s: float) -> None:
        """A version that is waited for always comes."""

    async def wait(self, version: WeightVersion, *, timeout_s: float) -> WeightVersion:
        self._next = version
        while (
            version >= len(self._history.weights)
            or self._finished < (version + self._staleness) * self._samples_per_step
        ):
            self._changed.clear()
            await self._changed.wait()
        return version

    async def heard(self, *, timeout_s: float) -> None:
        """The trainer is never lost."""

    @contextmanager
    def weights(self) -> Iterator[tuple[WeightVersion, dict[str, torch.Tensor]]]:
        yield self._next, self._history.weights[self._next]

    def installed(self, version: WeightVersion) -> None:
        """The installed version is not needed."""

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        yield


class OneStep:
    """A gate that lets in one parcel at a time, so that each batch of the engine is the rows of one step."""

    def __init__(self, gate: WeightsGate) -> None:
        self._gate = gate
        self._alone = asyncio.Lock()

    @asynccontextmanager
    async def generating(self, needed: WeightVersion) -> AsyncIterator[None]:
        async with self._alone, self._gate.generating(needed):
            yield


async def pipelined(config: RunConfig, inputs: Inputs, parts: Parts, stack: AsyncExitStack) -> History:
    """Run the real pipeline, with an engine that updates itself."""
    history = History()
    history.keep(parts.trainer.weights())
    samples, staleness = config.trainer.train_batch_size, config.pipeline.max_staleness
    source = JustInTime(history, parts.trainer.weights, staleness, samples)
    log = EventLog(sinks=(source.saw,))
    opened = await open_queue(config.queue, run_table(config), Path(), stack)
    queue = opened.queue
    updater = EngineUpdater(parts.engine, source, "delayed", log=log, activity=Activity(log, "rollout"), timeout_s=60.0)
    context = TaskContext(
        config=config,
        model_dir=inputs.model_dir,
        queue=queue,
        log=log,
        activity=Activity(log, "all"),
        memory=MemoryUse(log, "driver", "cpu"),
        executor=TimedExecutor(parts.device),
        stack=stack,
        graders=dict(parts.graders.pools) if parts.graders else {},
    )
    port = LocalPort(parts.engine, EngineFacts(), log=log, activity=context.activity, gate=OneStep(updater))
    services = [
        Generation(config, [port], queue, inputs.decode, log),
        *await make_services(parts.algorithm, "reward", context),
    ]
    store = CheckpointStore(Path(config.output_dir), keep=1)
    learner = make_learner(context, parts.algorithm, parts.trainer, source, store, prompts="")
    pipeline = make_pipeline(config, inputs, queue, services, learner, None, store)
    with recorded() as steps:
        async with asyncio.TaskGroup() as tasks:
            updating = tasks.create_task(updater.run())
            await pipeline.run()
            updating.cancel()
    history.rewards = [[cast(float, row.cells["reward"]) for row in result.rows] for result in steps]
    return history


@contextmanager
def recorded() -> Iterator[list[StepResult]]:
    """Record what each step was trained on."""
    steps: list[StepResult] = []

    def keeping(result: StepResult, step: int, seconds: float) -> dict[str, float]:
        steps.append(result)
        return step_metrics(result, step, seconds)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tailrace.run.learner.step_metrics", keeping)
        yield steps


async def history_of(
    config: RunConfig, work: Callable[[RunConfig, Inputs, Parts, AsyncExitStack], Awaitable[History]]
) -> History:
    """Open the parts of a run and let `work` learn with them."""
    inputs = load_inputs(config)
    async with AsyncExitStack() as stack:
        return await work(config, inputs, await open_parts(config, inputs, stack), stack)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("staleness", [0, 1, 2])
async def test_a_run_with_a_staleness_equals_a_plain_loop_with_weights_that_are_so_old_bit_for_bit(
    tmp_path: Path, tiny_model: TinyModel, prompts: Path, staleness: int, streaming: bool
) -> None:
    config = small_run(
        tmp_path / "run",
        tiny_model("llama"),
        prompts,
        pipeline={"max_staleness": staleness, "streaming": streaming, "in_order": streaming},
        trainer__steps=4,
        prompts__held_out=0,
    )
    prepare_torch(config.device, config.threads)
    ours, plain = await history_of(config, pipelined), await history_of(config, delayed_loop)
    assert ours.rewards == plain.rewards
    assert len(ours.weights) == len(plain.weights) == 5
    for one, other in zip(ours.weights, plain.weights, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert any(not torch.equal(ours.weights[3][name], ours.weights[4][name]) for name in ours.weights[4])


async def test_the_plain_loops_of_different_staleness_differ(
    tmp_path: Path, tiny_model: TinyModel, prompts: Path
) -> None:
    rewards = []
    for staleness in range(3):
        config = small_run(
            tmp_path / "run", tiny_model("llama"), prompts, pipeline={"max_staleness": staleness}, prompts__held_out=0
        )
        rewards.append((await history_of(config, delayed_loop)).rewards)
    assert rewards[0][:1] == rewards[1][:1] == rewards[2][:1]
    assert rewards[0][1:] != rewards[1][1:]
    assert rewards[1][2:] != rewards[2][2:]


def test_a_run_two_steps_ahead_learns_its_task_within_its_bound(
    tmp_path: Path, tiny_model: TinyModel, prompts: Path
) -> None:
    config = small_run(
        tmp_path / "run",
        tiny_model("llama"),
        prompts,
        algorithm={"type": "grpo", "group_size": 8},
        trainer={"steps": 15, "train_batch_size": 32, "precision": "bf16", "lr": 3e-3},
        engine={"type": "native", "dtype": "bfloat16", "kv_cache_gib": 0.01},
        evaluation={"every": 15},
        pipeline={"max_staleness": 2, "streaming": True},
    )
    assert train(config, resume=False) == 0
    steps = steps_of(tmp_path / "run")
    rewards = [event.metrics["reward"] for event in steps]
    assert sum(rewards[-5:]) >= 2 * sum(rewards[:5])
    assert 1 <= max(event.metrics["staleness_max"] for event in steps) <= 2


class Interrupting(EventLog):
    """An event log that stops the run at one sample, as Ctrl-C does."""

    def emit(self, event: Event) -> None:
        super().emit(event)
        if event.task == "sample" and event.step == 3 and not self.asked:
            self.asked.append(event)
            os.kill(os.getpid(), signal.SIGINT)

    asked: list[Event]


@pytest.mark.parametrize("staleness", [1, 2])
def test_an_asynchronous_run_that_is_interrupted_trains_on_every_row_once(
    tmp_path: Path, tiny_model: TinyModel, prompts: Path, staleness: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_run(
        tmp_path / "run",
        tiny_model("llama"),
        prompts,
        pipeline={"max_staleness": staleness, "streaming": True},
        trainer__steps=6,
    )
    Interrupting.asked = []
    monkeypatch.setattr("tailrace.run.log.EventLog", Interrupting)
    with recorded() as steps:
        assert train(config, resume=False) == 130
        assert 0 < len(steps) < 6
        assert train(config, resume=True) == 0
    check_rows(steps, staleness)


@pytest.mark.parametrize("staleness", [1, 2])
def test_an_asynchronous_run_goes_on_from_a_checkpoint_and_trains_on_every_row_once(
    tmp_path: Path, tiny_model: TinyModel, prompts: Path, staleness: int
) -> None:
    run = tmp_path / "run"
    changes = {"pipeline": {"max_staleness": staleness, "streaming": True}, "trainer__steps": 6}
    with recorded() as whole:
        assert train(small_run(run, tiny_model("llama"), prompts, **changes), resume=False) == 0
    check_rows(whole, staleness)
    with recorded() as resumed:
        config = small_run(run, tiny_model("llama"), prompts, **changes)
        assert train(config, resume=True, checkpoint=run / "checkpoints" / "step_000002") == 0
    check_rows([*whole[:2], *resumed], staleness)


def check_rows(steps: list[StepResult], staleness: int) -> None:
    """Assert that each step trained on its own 8 rows, none of them staler than allowed."""
    assert [[row.order for row in result.rows] for result in steps] == [
        list(range(8 * step, 8 * step + 8)) for step in range(len(steps))
    ]
    for step, result in enumerate(steps):
        oldest = min(int(cast("np.ndarray[Any, Any]", row.cells["weight_versions"]).min()) for row in result.rows)
        assert 0 <= step - oldest <= staleness
