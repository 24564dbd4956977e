"""Runs and engines that a Python program makes.

Most tests run workers in an event loop of this process; the page's example has real ones.
"""

import asyncio
import math
import os
import re
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tailrace import Trainer
from tailrace.cluster.local import LocalCluster, LocalHandle
from tailrace.config.load import load_config
from tailrace.config.rewards import GivenReward
from tailrace.config.run import RunConfig
from tailrace.conformance.requests import make_request
from tailrace.errors import (
    ClusterError,
    ConfigError,
    NothingGraded,
    PeerLost,
    PromptError,
    QueueTimeout,
    TailraceError,
    UserError,
    WeightsError,
    WeightsTimeout,
)
from tailrace.events import Event, EventLog, read_events
from tailrace.report.samples import read_samples
from tailrace.rollout.updater import EngineUpdater
from tailrace.run.loop_runtime import log_warnings
from tailrace.run.own_loop import Engines
from tailrace.run.train import train
from tailrace.transfer.queue.adapters.tensors import PackedTensor, TensorBatch
from tailrace.transfer.queue.client.sync_queue import SyncQueue
from tailrace.transfer.weights.sender import WeightSender
from tailrace.types import Prompt
from tests.conftest import TinyModel
from tests.engine.helpers import make_core, run_core
from tests.helpers.local_workers import QueueThreads
from tests.helpers.runs import learned, small_run, steps_of, write_prompts

PAGE = (Path(__file__).parents[1] / "docs" / "api.md").read_text()
EXAMPLES: list[str] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
SEPARATED: dict[str, Any] = {"pipeline": {"placement": "separated"}}
STALE: dict[str, Any] = {"pipeline": {"placement": "separated", "max_staleness": 1}}
LIMIT_S = 60.0


@pytest.fixture
def small(tmp_path: Path, tiny_model: TinyModel) -> Callable[..., RunConfig]:
    """`small("name", **changes)` is the configuration of a small run in a directory of that name."""
    prompts = write_prompts(tmp_path / "prompts.jsonl")
    return lambda name, **changes: small_run(tmp_path / name, tiny_model("llama"), prompts, **changes)


class Workers:
    """The workers of the cluster that was made last, in the event loop of its driver."""

    def __init__(self) -> None:
        self.cluster: LocalCluster
        self.loop: asyncio.AbstractEventLoop

    def make_cluster(self, config: Any, _: Any) -> LocalCluster:
        self.loop = asyncio.get_running_loop()
        self.cluster = LocalCluster(config)
        return self.cluster

    def named(self, name: str) -> list[LocalHandle]:
        return [handle for handle in self.cluster.handles if handle.name == name]

    def kill(self, name: str) -> None:
        asyncio.run_coroutine_threadsafe(self.named(name)[-1].kill(), self.loop).result(LIMIT_S)


@pytest.fixture
def local(monkeypatch: pytest.MonkeyPatch) -> Workers:
    """Run workers in an event loop of this process."""
    workers = Workers()
    for module in ("separated", "loop_runtime"):
        monkeypatch.setattr(f"tailrace.run.{module}.make_cluster", workers.make_cluster)
    monkeypatch.setattr("tailrace.run.queue.queue_processes", QueueThreads)
    return workers


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_fit_trains_as_the_command_does_from_a_path_a_mapping_or_a_configuration(
    tmp_path: Path, small: Callable[..., RunConfig]
) -> None:
    values = small("mapping", trainer__steps=2).model_dump(mode="json")
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(values))
    recipes: dict[str, Any] = {"path": str(tmp_path / "recipe.yaml"), "mapping": values, "config": small("config")}
    changes = {name: [f"output_dir={tmp_path / name}", "trainer.steps=2"] for name in recipes}
    results = {name: Trainer(recipe, changes[name]).fit() for name, recipe in recipes.items()}
    train(small("command", trainer__steps=2), resume=False)
    for name, result in results.items():
        assert result.directory == tmp_path / name
        assert result.report.is_file()
        assert_same(weights(result.model), weights(tmp_path / "command" / "model"))
        assert result.metrics == steps_of(result.directory)[-1].metrics
        assert "accuracy" in result.evaluation


def test_a_function_and_rows_of_a_program_are_part_of_the_run(tmp_path: Path, small: Callable[..., RunConfig]) -> None:
    wanted = "e"
    rows = [{"prompt": f"n{number}", "answer": None} for number in range(12)]
    changes = ["trainer.steps=2", "checkpoint.every=1"]
    recipe = Trainer(small("run"), changes, reward=lambda response: float(wanted in response), prompts=rows)
    grader = recipe.config.rewards.grader
    assert isinstance(grader, GivenReward)
    result = recipe.fit()
    steps = steps_of(result.directory)
    assert len(steps) == 2
    assert all(step.metrics["reward_failures"] == 0 for step in steps if "reward_failures" in step.metrics)
    shown = (result.directory / "events.jsonl").read_text()
    assert grader.pickled not in shown
    again = load_config(result.directory / "config.yaml", ["trainer.steps=3"])
    assert again.rewards.grader == grader
    assert train(again, resume=True) == 0  # as the command does, without the program
    assert len(steps_of(result.directory)) == 3
    changes[0] = "trainer.steps=4"
    with pytest.raises(
        UserError, match=r"given/prompts\.\w+ differs from the file that the run in .* began with; give the same"
    ):
        Trainer(again, changes, prompts=[*rows, {"prompt": "more", "answer": None}]).fit(resume=True)
    assert Trainer(again, changes, prompts=rows).fit(resume=True).metrics == steps_of(result.directory)[-1].metrics


def test_rows_of_a_start_that_is_refused_are_not_left(tmp_path: Path, small: Callable[..., RunConfig]) -> None:
    with pytest.raises(UserError, match=r"held_out"):
        Trainer(small("run"), reward=lambda response: 1.0, prompts=[{"prompt": "x", "answer": "y"}]).fit()
    assert not (tmp_path / "run").exists()
    with pytest.raises(UserError):
        Trainer(small("run", **SEPARATED), prompts=[{"prompt": "x", "answer": "y"}]).init_engines()
    assert not (tmp_path / "run").exists()


def test_a_recipe_that_is_wrong_is_refused_in_one_line(small: Callable[..., RunConfig]) -> None:
    values = small("run").model_dump(mode="json")
    with pytest.raises(ConfigError, match=r"recipe: unknown key trainer\.stepz; did you mean trainer\.steps\?"):
        Trainer({**values, "trainer": {"stepz": 1}})
    with pytest.raises(ConfigError, match=r"recipe: seed is of type object; expected a text, a number"):
        Trainer({**values, "seed": object()})
    with pytest.raises(ConfigError, match=r"the recipe nowhere\.yaml does not exist"):
        Trainer("nowhere.yaml")
    with pytest.raises(ConfigError, match=r"overrides is one text; expected a list of them, such as "):
        Trainer(values, "seed=1")
    with pytest.raises(ConfigError, match="recipe is 5; expected the path"):
        Trainer(5)  # type: ignore[arg-type]


async def test_fit_runs_where_an_event_loop_runs(small: Callable[..., RunConfig]) -> None:
    result = Trainer(small("run", trainer__steps=1)).fit()
    assert len(steps_of(result.directory)) == 1


@pytest.fixture(params=["script", "notebook"])
def run_as(request: pytest.FixtureRequest) -> Iterator[Callable[[Callable[[], Any]], Any]]:
    """Call a function as a script does, or as a notebook's cell does, in which an event loop runs."""
    loop = asyncio.new_event_loop()

    async def cell(work: Callable[[], Any]) -> Any:
        return work()

    yield (lambda work: work()) if request.param == "script" else lambda work: loop.run_until_complete(cell(work))
    loop.close()


def test_an_interrupted_fit_saves_and_raises_and_resumes(
    small: Callable[..., RunConfig],
    run_as: Callable[[Callable[[], Any]], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Interrupting(EventLog):
        def forward(self, event: Event) -> None:
            super().forward(event)
            if (event.task, event.step) == ("step", 0):
                os.kill(os.getpid(), signal.SIGINT)

    config = small("run", trainer__steps=30, checkpoint={"every": 100}, evaluation={"every": 100})
    with monkeypatch.context() as patched:
        patched.setattr("tailrace.run.log.EventLog", Interrupting)
        with pytest.raises(KeyboardInterrupt):
            run_as(Trainer(config).fit)
    trained = len(steps_of(Path(config.output_dir)))
    assert 1 <= trained < 30
    result = run_as(lambda: Trainer(config).fit(resume=True))
    assert [event.step for event in steps_of(result.directory)] == list(range(30))
    with pytest.raises(UserError, match="holds a run already"):
        Trainer(config).fit()


def versions_of(batch: TensorBatch) -> set[int]:
    column = batch.columns["weight_versions"]
    assert isinstance(column, PackedTensor)
    return set(column.values.tolist())


def all_prompts(config: RunConfig, engines: Engines) -> list[Prompt]:
    return list(engines.prompts[: config.trainer.steps * config.groups_per_step])


def random_weights(directory: Path, seed: int) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [(name, torch.randn(tensor.shape, generator=generator)) for name, tensor in weights(directory).items()]


def test_a_loop_of_ones_own_with_our_trainer_makes_the_run_bit_for_bit(
    small: Callable[..., RunConfig], local: Workers
) -> None:
    changes = {"prompts__shuffle": False, **SEPARATED}
    run = Trainer(small("run", **changes)).fit()
    config = small("own", **changes)
    with Trainer(config).init_engines() as engines:
        trainer = engines.make_trainer()
        assert engines.put_prompts_data(all_prompts(config, engines)) == list(range(8))
        for version in range(1, config.trainer.steps + 1):
            batch = engines.get_experience_data()
            with engines.held(batch):
                trainer.accumulate(engines.train_samples(batch), engines.loss)
                trainer.apply()
                advantages = batch.columns["advantages"]
                assert isinstance(advantages, PackedTensor)
                advantages.values.mul_(100)  # as by a loop that scales them in place
                engines.put_experience_data(batch)
            assert versions_of(batch) == {version - 1}
            engines.weight_sync_notify(version, trainer.weights())
    trained = {name: tensor for name, tensor in trainer.weights() if name in weights(run.model)}
    assert_same(trained, weights(run.model))
    assert [name for name, _ in read_workers(config)] == ["reward-0", "rollout-0"]
    assert_told_alike(Path(config.output_dir), run.directory)


def test_a_loop_of_ones_own_has_more_and_fewer_engines_while_it_goes_on(
    small: Callable[..., RunConfig], local: Workers
) -> None:
    config = small("own", trainer__steps=3, **STALE)
    with Trainer(config).init_engines() as engines:
        engines.put_prompts_data(all_prompts(config, engines))
        seen = []
        for version, workers in enumerate((2, 1, 2), 1):
            assert f"→ {workers} engines, by hand" in engines.scale(workers)
            batch = engines.get_experience_data()
            seen += [row.group_id for row in batch.claim.rows]
            engines.put_experience_data(batch)
            engines.weight_sync_notify(version, random_weights(engines.model_dir, version))
        with pytest.raises(ConfigError, match="rollout=0 is no number of workers; give 1 or more"):
            engines.scale(0)
        with pytest.raises(ConfigError, match=r"rollout\.large is no pool of rollout workers; there are rollout"):
            engines.scale(1, "rollout.large")
    assert Counter(seen) == dict.fromkeys(range(6), config.algorithm.group_size)
    scales = [event for event in read_events(Path(config.output_dir) / "events.jsonl") if event.task == "scale"]
    assert [event.info["by"] for event in scales] == ["hand"] * 3


def test_a_loop_of_ones_own_chooses_the_number_of_its_engines_itself(
    small: Callable[..., RunConfig], tmp_path: Path
) -> None:
    config = small("own", cluster={"rollout": {"max_workers": 3}}, **SEPARATED)
    with pytest.raises(ConfigError, match=r"cluster\.rollout has min_workers or max_workers.*and call scale\(N\)"):
        Trainer(config).init_engines()
    assert not (tmp_path / "own").exists()


def assert_told_alike(own: Path, run: Path) -> None:
    """Assert that the loop's steps and samples are those of the run, but for the figures of updates."""
    steps = [learned(event) for event in steps_of(own)]
    assert [step["reward"] for step in steps] == [event.metrics["reward"] for event in steps_of(run)]
    assert all(step.items() <= learned(event).items() for step, event in zip(steps, steps_of(run), strict=True))
    ours, theirs = (
        [one for one in read_samples(path / "samples.jsonl") if one.kind == "training"] for path in (own, run)
    )
    assert ours == theirs
    page = (own / "report.html").read_text()
    assert "A training loop of its own, which closed its engines after 4 steps." in page
    assert "No training step" not in page


def read_workers(config: RunConfig) -> list[tuple[str, str]]:
    events = read_events(Path(config.output_dir) / "events.jsonl")
    return sorted((event.actor, event.task) for event in events if event.task.startswith("worker_"))


@pytest.mark.parametrize("mode", ["synchronous", "in_flight"])
def test_prompts_wait_for_the_weights_that_the_recipe_asks_for(
    small: Callable[..., RunConfig], local: Workers, mode: str
) -> None:
    config = small("own", weights={"mode": mode}, trainer__steps=3, **STALE)
    with Trainer(config).init_engines() as engines:
        prompts = all_prompts(config, engines)
        engines.put_prompts_data(prompts[:3])
        engines.put_prompts_data(prompts[3:])
        first, second = (engines.get_experience_data() for _ in range(2))
        assert {row.group_id for row in (*first.claim.rows, *second.claim.rows)} == {0, 1, 2, 3}
        with pytest.raises(QueueTimeout):
            engines.get_experience_data(timeout=0.2)  # step 2 may not begin with version 0
        engines.weight_sync_notify(1, random_weights(engines.model_dir, 1))
        third = engines.get_experience_data()
        assert {row.group_id for row in third.claim.rows} == {4, 5}
        assert versions_of(third) == {1}
        for batch in (first, second, third):
            engines.put_experience_data(batch)


def test_a_streaming_loop_gets_its_step_in_parts_with_what_the_reference_says(
    small: Callable[..., RunConfig], local: Workers
) -> None:
    pipeline = {"placement": "separated", "streaming": True}
    config = small("own", pipeline=pipeline, algorithm__kl={"coefficient": 0.01}, trainer__micro_batch_tokens=48)
    with Trainer(config).init_engines() as engines:
        engines.put_prompts_data(engines.prompts[:2])
        parts: list[TensorBatch] = []
        missing = config.trainer.train_batch_size
        while missing:
            parts.append(engines.get_experience_data(count=missing))
            missing -= len(parts[-1].claim.rows)
        assert [len(part.claim.rows) for part in parts] == [4, 4]
        for part in parts:
            responses, reference = part.columns["response_ids"], part.columns["ref_log_probs"]
            assert isinstance(responses, PackedTensor)
            assert isinstance(reference, PackedTensor)
            assert torch.equal(responses.offsets, reference.offsets)
            engines.put_experience_data(part)


def test_rows_that_are_not_put_come_again(small: Callable[..., RunConfig], local: Workers) -> None:
    with Trainer(small("own", **SEPARATED)).init_engines() as engines:
        engines.put_prompts_data(engines.prompts[:2])
        batch = engines.get_experience_data()
        with engines.held(batch):
            pass
        again = engines.get_experience_data()
        assert [row.id for row in again.claim.rows] == [row.id for row in batch.claim.rows]


def test_a_killed_worker_is_replaced_while_the_caller_goes_on(
    small: Callable[..., RunConfig], local: Workers, caplog: pytest.LogCaptureFixture
) -> None:
    config = small("own", **STALE)
    with Trainer(config).init_engines() as engines:
        engines.put_prompts_data(all_prompts(config, engines))
        for version in range(1, config.trainer.steps + 1):
            batch = engines.get_experience_data(timeout=LIMIT_S)
            assert len(batch.claim.rows) == 8
            engines.put_experience_data(batch)
            if version == 1:
                local.kill("rollout-0")
                local.kill("reward-0")
            engines.weight_sync_notify(version, random_weights(engines.model_dir, version))
    assert len(local.named("rollout-0")) == len(local.named("reward-0")) == 2
    assert sorted(line.partition(":")[0] for line in caplog.messages) == ["reward-0 died", "rollout-0 died"]


def test_what_a_run_would_warn_of_is_in_the_log_of_a_program(caplog: pytest.LogCaptureFixture) -> None:
    log_warnings(
        Event(task="warning", actor="driver", start=0.0, end=0.0, info={"kind": "k", "text": "all rewards are equal"})
    )
    log_warnings(Event(task="step", actor="trainer", start=0.0, end=1.0))
    assert caplog.messages == ["all rewards are equal"]


def test_what_cannot_be_mended_reaches_the_call_that_waits(small: Callable[..., RunConfig], local: Workers) -> None:
    config = small("own", cluster={"max_deaths": 0}, **STALE)
    with Trainer(config).init_engines() as engines:
        local.loop.call_soon_threadsafe(lambda: asyncio.ensure_future(local.named("rollout-0")[0].kill()))
        with pytest.raises(ClusterError, match=r"cluster\.max_deaths is 0"):
            engines.get_experience_data(timeout=LIMIT_S)
        with pytest.raises(ClusterError, match=r"cluster\.max_deaths is 0"):
            engines.put_prompts_data(engines.prompts[:1])


def test_weights_that_the_model_does_not_have_end_the_engines_at_the_next_call(
    small: Callable[..., RunConfig], local: Workers
) -> None:
    with Trainer(small("own", **STALE)).init_engines() as engines:
        engines.put_prompts_data(engines.prompts[:2])
        engines.put_experience_data(engines.get_experience_data(timeout=LIMIT_S))
        engines.weight_sync_notify(1, [("no.such.weight", torch.zeros(2))])
        with pytest.raises(TailraceError, match=r"no\.such\.weight"):
            engines.get_experience_data(timeout=LIMIT_S)


def test_a_failure_that_no_call_has_told_of_is_told_at_the_end(
    tmp_path: Path, small: Callable[..., RunConfig], local: Workers
) -> None:
    engines = Trainer(small("own", cluster={"max_deaths": 0}, **STALE)).init_engines()
    local.kill("reward-0")
    engines._runtime._thread.join(LIMIT_S)
    with pytest.raises(ClusterError, match=r"cluster\.max_deaths is 0"):
        engines.close()
    engines.close()
    [page] = tmp_path.glob("own/report.html")
    assert "Failed: No training step has finished. " in page.read_text()


def test_the_caller_grades_where_no_reward_worker_does(small: Callable[..., RunConfig], local: Workers) -> None:
    config = small("own", **SEPARATED)
    with Trainer(config).init_engines(workers=["rollout"]) as engines:
        engines.put_prompts_data(engines.prompts[:2])
        for _ in range(8):
            batch = engines.get_experience_data("reward", count=1)
            responses = batch.columns["response"]
            assert isinstance(responses, list)
            engines.put_experience_data(
                batch, {"reward": [float(len(responses[0]))], "reward_error": [""], "reward_parts": [{}]}
            )
        for _ in range(2):
            group = engines.get_experience_data("advantage", count=4)
            mask = group.columns["response_mask"]
            assert isinstance(mask, PackedTensor)
            engines.put_experience_data(
                group, {"advantages": replace(mask, values=torch.full_like(mask.values, 3, dtype=torch.float32))}
            )
        advantages = engines.get_experience_data().columns["advantages"]
        assert isinstance(advantages, PackedTensor)
        assert set(advantages.values.tolist()) == {3}
    assert [handle.name for handle in local.cluster.handles] == ["rollout-0"]


def test_a_step_whose_gradings_have_all_failed_is_not_handed_to_the_caller(
    small: Callable[..., RunConfig], local: Workers
) -> None:
    with Trainer(small("own", **SEPARATED)).init_engines(workers=["rollout"]) as engines:
        engines.put_prompts_data(engines.prompts[:2])
        failed: dict[str, Any] = {"reward": [math.nan], "reward_error": ["KeyError: 'a' (my.py, line 1)"]}
        for _ in range(8):
            batch = engines.get_experience_data("reward", count=1)
            engines.put_experience_data(batch, {**failed, "reward_parts": [{}]})
        for _ in range(2):
            group = engines.get_experience_data("advantage", count=4)
            mask = group.columns["response_mask"]
            assert isinstance(mask, PackedTensor)
            advantages = torch.zeros_like(mask.values, dtype=torch.float32)
            engines.put_experience_data(group, {"advantages": replace(mask, values=advantages)})
        with pytest.raises(
            NothingGraded, match=r"all 8 gradings of step 1 have failed.*KeyError: 'a' \(my.py, line 1\)"
        ):
            engines.get_experience_data()


def test_a_version_that_was_sent_is_notified_again_after_a_wait_too_long_and_a_queue_that_did_not_hear(
    small: Callable[..., RunConfig], local: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    install, installed = EngineUpdater._install, WeightSender.installed
    may_install, limits = asyncio.Event(), [0.1, LIMIT_S, LIMIT_S]

    async def install_later(updater: EngineUpdater) -> None:
        await may_install.wait()
        await install(updater)

    async def installed_within(sender: WeightSender, version: int, *, timeout_s: float) -> None:
        await installed(sender, version, timeout_s=limits.pop(0))

    def unheard(*_: object) -> None:
        raise PeerLost("nobody there")

    monkeypatch.setattr(EngineUpdater, "_install", install_later)
    monkeypatch.setattr(WeightSender, "installed", installed_within)
    config = small("own", **SEPARATED)
    with Trainer(config).init_engines() as engines:
        engines.put_prompts_data(engines.prompts[:4])
        engines.put_experience_data(engines.get_experience_data())
        new = random_weights(engines.model_dir, 1)
        with pytest.raises(WeightsTimeout, match=r"rollout-0: version 1 .* not installed"):
            engines.weight_sync_notify(1, new)
        local.loop.call_soon_threadsafe(may_install.set)
        with monkeypatch.context() as patch:
            patch.setattr(SyncQueue, "advance", unheard)
            with pytest.raises(PeerLost, match="nobody there"):
                engines.weight_sync_notify(1, new)
        engines.weight_sync_notify(1, new)
        second = engines.get_experience_data()
        assert versions_of(second) == {1}
        engines.put_experience_data(second)
        with pytest.raises(WeightsError, match="newer"):
            engines.weight_sync_notify(1, new)
    events = read_events(Path(config.output_dir) / "events.jsonl")
    assert [event.version for event in events if event.task == "weights_publish"] == [1]
    [begun] = [event.info for event in events if event.task == "run"]
    assert begun.keys() == {"config", "tailrace", "resumed_from", "trained_steps", "total_steps", "machine"}


def test_engines_that_cannot_be_used_are_ended(
    small: Callable[..., RunConfig], local: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise PeerLost("nobody there")

    monkeypatch.setattr("tailrace.run.own_loop.SyncQueue", fail)
    with pytest.raises(PeerLost, match="nobody there"):
        Trainer(small("own", **SEPARATED)).init_engines()
    assert local.loop.is_closed()


def test_what_cannot_be_started_or_put_is_refused(small: Callable[..., RunConfig], local: Workers) -> None:
    with pytest.raises(ConfigError, match=r"use pipeline\.placement=separated"):
        Trainer(small("own")).init_engines()
    with pytest.raises(ConfigError, match=r"workers: 'rewards' is not one of rollout, reward; did you mean 'reward'"):
        Trainer(small("own", **SEPARATED)).init_engines(workers=["rollout", "rewards"])
    with pytest.raises(ConfigError, match=r"workers: \['reward'\] has no 'rollout'"):
        Trainer(small("own", **SEPARATED)).init_engines(workers=["reward"])
    with pytest.raises(ConfigError, match=r"device is cuda, and cluster\.rollout\.gpus is 0"):
        Trainer(small("own", device="cuda", **SEPARATED)).init_engines()
    engine = {"type": "native", "dtype": "float32", "kv_cache_gib": 0.00001}
    with pytest.raises(ConfigError, match="kv_cache_gib"):
        Trainer(small("own", engine=engine, **SEPARATED)).init_engines()
    with Trainer(small("own", **SEPARATED)).init_engines() as engines:
        long = replace(engines.prompts[0], prompt_ids=np.arange(50))
        with pytest.raises(PromptError, match=r"has 50 tokens, .* raise prompts\.max_prompt_tokens"):
            engines.put_prompts_data([engines.prompts[0], long])
        with pytest.raises(PromptError, match=r"'What is 1\+1\?' is a str, not a tailrace\.types\.Prompt"):
            engines.put_prompts_data(["What is 1+1?"])  # type: ignore[list-item]
        assert engines.put_prompts_data(engines.prompts[:1]) == [0]
        with pytest.raises(WeightsError, match=r"version 7 counts steps .* rows of 0 so far"):
            engines.weight_sync_notify(7, random_weights(engines.model_dir, 7))
    with pytest.raises(ClusterError, match="were closed"):
        engines.put_prompts_data(engines.prompts[:1])
    with pytest.raises(UserError, match="holds a run already"):
        Trainer(small("own", **SEPARATED)).init_engines()


def test_the_loop_of_the_page_trains_with_real_workers(
    tmp_path: Path, small: Callable[..., RunConfig], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (code,) = [code for code in EXAMPLES if "init_engines" in code]
    values = small("unused", **STALE, sampling__temperature=0.6).model_dump(mode="json")
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(values))
    assert "recipes/smollm2_async.yaml" in code
    assert "STEPS = 20" in code
    monkeypatch.chdir(tmp_path)
    exec(code.replace("recipes/smollm2_async.yaml", "recipe.yaml").replace("STEPS = 20", "STEPS = 3"), {})
    assert re.findall(r"^step (\d): reward \d\.\d+, loss -?\d\.\d+$", capsys.readouterr().out, re.MULTILINE) == [
        "1",
        "2",
        "3",
    ]
    events = read_events(tmp_path / "runs/own-loop/events.jsonl")
    pids = [event.info["pid"] for event in events if event.task == "worker_started"]
    assert len(pids) == 2
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    trained = weights(tmp_path / "runs/own-loop/model")
    initial = weights(Path(values["model"]["path"]))
    assert any(not torch.equal(trained[name], initial[name]) for name in initial)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "runs/own-loop/model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "runs/own-loop/model")
    assert len(tokenizer) == model.config.vocab_size
    assert tokenizer.chat_template


def packed(arrays: Sequence[np.ndarray[Any, Any]]) -> PackedTensor:
    offsets = np.cumsum([0, *map(len, arrays)])
    return PackedTensor(values=torch.from_numpy(np.concatenate(arrays)), offsets=torch.from_numpy(offsets))


@pytest.mark.usefixtures("local")
def test_the_loop_of_the_page_trains_with_the_trainer_of_the_recipe(
    tmp_path: Path, small: Callable[..., RunConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    (whole,) = [code for code in EXAMPLES if "init_engines" in code]
    (loop,) = [code for code in EXAMPLES if "make_trainer" in code]
    before, _, after = whole.partition("    model = AutoModelForCausalLM")
    (put,) = [line for line in after.splitlines() if "put_prompts_data" in line]
    code = "\n".join(["from pathlib import Path", before, put, loop]).replace("STEPS = 20", "STEPS = 2")
    config = small("unused", **STALE)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    for page, here in {"recipes/smollm2_async.yaml": "recipe.yaml", "runs/own-loop": "loop"}.items():
        code = code.replace(page, str(tmp_path / here))
    exec(code, {})
    told = re.findall(r"^step (\d): reward \d\.\d+, loss -?\d\.\d+$", capsys.readouterr().out, re.MULTILINE)
    assert told == ["1", "2"]
    trained, initial = weights(tmp_path / "loop" / "model"), weights(Path(config.model.path))
    assert any(not torch.equal(trained[name], initial[name]) for name in trained)


@pytest.mark.parametrize("temperature", [0.3, 0.6, 1.0, 1.7])
def test_the_loss_of_the_page_clips_nothing_before_an_update(tiny_model: TinyModel, temperature: float) -> None:
    """At the sampling temperature the ratios are 1, so with advantages of 1 the loss is -1."""
    (code,) = [code for code in EXAMPLES if "init_engines" in code]
    (definition,) = re.findall(
        r"^def policy_loss.*?(?=^\S)", code.partition("STEPS = 20\n")[2], re.DOTALL | re.MULTILINE
    )
    names: dict[str, Any] = {"torch": torch}
    exec(definition, names)
    core = make_core(tiny_model("qwen2"))
    requests = [make_request(k, temperature=temperature, max_new_tokens=16, ignore_eos=True) for k in range(4)]
    samples = run_core(core, requests)
    columns = {
        "prompt_ids": packed([request.prompt_ids for request in requests]),
        "response_ids": packed([samples[k].response_ids for k in range(4)]),
        "rollout_log_probs": packed([samples[k].rollout_log_probs for k in range(4)]),
        "advantages": packed([np.ones(16, np.float32)] * 4),
    }
    model = AutoModelForCausalLM.from_pretrained(tiny_model("qwen2"), dtype=torch.float32)
    loss = names["policy_loss"](model, columns, temperature)
    assert loss.item() == pytest.approx(-1, abs=1e-4)


def test_the_run_of_the_page_is_fitted(
    tmp_path: Path, small: Callable[..., RunConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    (code,) = [code for code in EXAMPLES if "result.metrics" in code]
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(small("unused").model_dump(mode="json")))
    code = code.replace("recipes/quickstart.yaml", str(tmp_path / "recipe.yaml")).replace("steps=20", "steps=2")
    exec(code.replace("runs/mine", str(tmp_path / "mine")), {})
    *_, last = capsys.readouterr().out.splitlines()
    step = learned(steps_of(tmp_path / "mine")[-1])
    assert last.startswith(f"{tmp_path / 'mine' / 'model'} {step['reward']} ")
