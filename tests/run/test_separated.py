"""Runs with workers for each task train the same, whichever worker dies.

The workers run in this event loop. What only processes can show is in test_separated_processes.py.
"""

import asyncio
import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from tailrace.cluster.base import Report, WorkerSpec
from tailrace.cluster.local import LocalCluster, LocalHandle
from tailrace.config.run import RunConfig
from tailrace.errors import CheckpointError, ClusterError, ConfigError, ModelError, UserError, WorkerDied
from tailrace.events import Event, EventLog
from tailrace.report.prometheus import PrometheusSink
from tailrace.rollout.base import EngineFacts
from tailrace.run.generation import RemotePort
from tailrace.run.train import train
from tests.conftest import TinyModel
from tests.helpers.runs import assert_same_run, small_run, steps_of, weights
from tests.helpers.separated_runs import (
    FULLY_ASYNCHRONOUS,
    KL,
    SYNCHRONOUS,
    at_events,
    hold_trainer,
    of,
)
from tests.report.test_prometheus import scrape


def assert_whole(run: Path, steps: int, *, max_staleness: int) -> None:
    """Assert that every step was trained on all of its rows, none of them staler than allowed."""
    trained = steps_of(run)
    assert [event.step for event in trained] == list(range(steps))
    assert all(event.samples == 8 for event in trained)
    assert max(event.metrics["staleness_max"] for event in trained) <= max_staleness
    assert (run / "model" / "config.json").exists()


@pytest.mark.parametrize(
    ("pipeline", "mode"),
    [
        (SYNCHRONOUS, "synchronous"),
        ({**SYNCHRONOUS, "streaming": True, "in_order": True}, "in_flight"),
        ({**SYNCHRONOUS, "streaming": True, "in_order": True}, "delayed"),
        ({**SYNCHRONOUS, "streaming": True, "in_order": True}, "sub_step"),
    ],
)
def test_without_staleness_a_separated_run_equals_a_colocated_one_bit_for_bit(
    tmp_path: Path, tiny_model: TinyModel, prompts: Path, local: object, pipeline: dict[str, Any], mode: str
) -> None:
    train(small_run(tmp_path / "colocated", tiny_model("llama"), prompts, **KL), resume=False)
    config = small_run(
        tmp_path / "separated", tiny_model("llama"), prompts, pipeline=pipeline, weights={"mode": mode}, **KL
    )
    train(config, resume=False)
    assert_same_run(tmp_path / "colocated", tmp_path / "separated")


def test_a_run_with_two_controllers_of_its_queue_equals_one_with_one_bit_for_bit(
    tmp_path: Path, tiny_model: TinyModel, prompts: Path, local: object
) -> None:
    for controllers in (1, 2):
        queue = {"type": "service", "controllers": controllers, "units": 2}
        config = small_run(
            tmp_path / f"{controllers}", tiny_model("llama"), prompts, pipeline=SYNCHRONOUS, queue=queue, **KL
        )
        assert train(config, resume=False) == 0
    assert_same_run(tmp_path / "1", tmp_path / "2")


def test_several_controllers_are_refused_where_groups_must_come_in_the_order_of_the_run(
    tmp_path: Path, tiny_model: TinyModel, prompts: Path, local: object
) -> None:
    queue = {"type": "service", "controllers": 2, "units": 2}
    pipeline = {**SYNCHRONOUS, "streaming": True, "in_order": True}
    config = small_run(tmp_path / "run", tiny_model("llama"), prompts, pipeline=pipeline, queue=queue)
    with pytest.raises(UserError, match=r"pipeline\.in_order\), .* give queue\.controllers=1"):
        train(config, resume=False)


def test_weights_that_are_broadcast_make_the_same_run_bit_for_bit(
    tmp_path: Path, tiny_model: TinyModel, prompts: Path, local: object
) -> None:
    for medium in ("auto", "gloo"):
        config = small_run(
            tmp_path / medium,
            tiny_model("llama"),
            prompts,
            pipeline=SYNCHRONOUS,
            weights={"medium": medium},
            **KL,
        )
        assert train(config, resume=False) == 0
    assert_same_run(tmp_path / "auto", tmp_path / "gloo")
    transfers = of(tmp_path / "gloo", "weights_transfer")
    assert transfers[-1].info["medium"] == "gloo"
    assert all(event.metrics["broadcast_bytes"] > 0 for event in transfers if event.info["medium"] == "gloo")
    assert {event.info["medium"] for event in of(tmp_path / "auto", "weights_transfer")} == {"shared_memory"}


def test_nccl_without_a_gpu_is_refused_before_anything_is_trained(
    tmp_path: Path, tiny_model: TinyModel, prompts: Path, local: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = small_run(tmp_path / "run", tiny_model("llama"), prompts, pipeline=SYNCHRONOUS, weights={"medium": "nccl"})
    with pytest.raises(ConfigError, match=r"weights\.medium=nccl is for trainers and engines with CUDA"):
        train(config, resume=False)
    assert not (tmp_path / "run" / "model").exists()


def test_an_asynchronous_run_with_two_controllers_trains_every_step_on_its_own_rows(
    tmp_path: Path, tiny_model: TinyModel, prompts: Path, local: object
) -> None:
    run = tmp_path / "run"
    queue = {"type": "service", "controllers": 2, "units": 2}
    config = small_run(run, tiny_model("llama"), prompts, pipeline=FULLY_ASYNCHRONOUS, queue=queue, trainer__steps=6)
    assert train(config, resume=False) == 0
    assert_whole(run, 6, max_staleness=1)


def begin_together(monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    """Let no rollout worker begin before `workers` of them are ready."""
    ready, are, all_are = RemotePort.ready, set[str](), asyncio.Event()

    async def ready_together(port: RemotePort) -> EngineFacts:
        facts = await ready(port)
        are.add(port.name)
        if len(are) == workers:
            all_are.set()
        async with asyncio.timeout(60.0):
            await all_are.wait()
        return facts

    monkeypatch.setattr(RemotePort, "ready", ready_together)


@pytest.mark.parametrize("mode", ["synchronous", "delayed", "sub_step", "in_flight"])
@pytest.mark.parametrize("streaming", [False, True])
def test_an_asynchronous_run_trains_every_step_within_the_bound(
    tmp_path: Path,
    tiny_model: TinyModel,
    prompts: Path,
    local: object,
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
    streaming: bool,
) -> None:
    run = tmp_path / "run"
    begin_together(monkeypatch, 2)
    config = small_run(
        run,
        tiny_model("llama"),
        prompts,
        pipeline={"placement": "separated", "max_staleness": 2, "streaming": streaming},
        weights={"mode": mode},
        cluster={"rollout": {"workers": 2, "cpus": 0}},
        trainer__steps=6,
    )
    assert train(config, resume=False) == 0
    assert_whole(run, 6, max_staleness=2)
    assert {event.worker for event in of(run, "rollout")} == {"rollout-0", "rollout-1"}
    assert [event.version for event in of(run, "weights_publish")] == list(range(1, 7))


def test_a_killed_trainer_costs_the_steps_since_the_last_checkpoint_and_changes_nothing(
    tmp_path: Path, tiny_model: TinyModel, prompts: Path, local: list[LocalCluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for run in (whole, cut):
        config = small_run(run, tiny_model("llama"), prompts, pipeline=SYNCHRONOUS)
        if run is cut:
            at_events(monkeypatch, {"sample 3": lambda _: kill_local(local[-1], "trainer")})
        assert train(config, resume=False) == 0
    assert [event.step for event in steps_of(cut)] == [0, 1, 2, 2, 3]
    assert_same_run(whole, cut)


def test_a_checkpoint_that_is_damaged_when_the_trainer_dies_is_passed_over_and_named(
    tmp_path: Path,
    tiny_model: TinyModel,
    prompts: Path,
    local: list[LocalCluster],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    newest = cut / "checkpoints" / "step_000002"

    def damage(_: dict[str, int]) -> None:
        (newest / "run.json").write_text("{")
        kill_local(local[-1], "trainer")

    for run in (whole, cut):
        config = small_run(run, tiny_model("llama"), prompts, pipeline=SYNCHRONOUS, checkpoint={"every": 1, "keep": 5})
        if run is cut:
            at_events(monkeypatch, {"sample 2": damage})
        assert train(config, resume=False) == 0
    said = capsys.readouterr().err
    assert f"checkpoint {newest} is damaged: run.json has 1 bytes" in said
    assert f"the run goes on from {cut / 'checkpoints' / 'step_000001'}" in said
    assert [event.step for event in steps_of(cut)] == [0, 1, 1, 2, 3]
    assert_same_run(whole, cut)


def kill_local(cluster: LocalCluster, name: str) -> None:
    handle = next(handle for handle in cluster.handles if handle.name == name)
    asyncio.get_running_loop().create_task(handle.kill())


def test_a_run_from_an_older_checkpoint_goes_on_from_there_when_its_trainer_dies_before_it_has_saved(
    tmp_path: Path, tiny_model: TinyModel, prompts: Path, local: list[LocalCluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run must not go on from a newer checkpoint, which was left behind."""
    run = tmp_path / "run"
    config = small_run(run, tiny_model("llama"), prompts, pipeline=SYNCHRONOUS)
    assert train(config, resume=False) == 0
    before = weights(run)
    older = run / "checkpoints" / "step_000002"
    at_events(monkeypatch, {"sample 2": lambda _: kill_local(local[-1], "trainer")})
    assert train(config, resume=True, checkpoint=older) == 0
    assert [event.info["resumed_from"] for event in of(run, "run")] == [None, str(older), str(older)]
    assert [event.step for event in steps_of(run)] == [0, 1, 2, 3, 2, 3]
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(run).items())


def trained_with_a_checkpoint_elsewhere(directory: Path, model: Path, prompts: Path) -> tuple[RunConfig, Path]:
    """Make a run that has ended, and move its first checkpoint away. Return its configuration and that checkpoint."""
    run, elsewhere = directory / "run", directory / "elsewhere"
    config = small_run(run, model, prompts, pipeline=SYNCHRONOUS, checkpoint={"every": 1, "keep": 5})
    assert train(config, resume=False) == 0
    (run / "checkpoints" / "step_000001").rename(elsewhere)
    return config, elsewhere


def test_a_run_from_a_checkpoint_of_elsewhere_goes_on_from_its_own_when_it_has_saved_one(
    tmp_path: Path, tiny_model: TinyModel, prompts: Path, local: list[LocalCluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, elsewhere = trained_with_a_checkpoint_elsewhere(tmp_path, tiny_model("llama"), prompts)
    deaths = {step: lambda _: kill_local(local[-1], "trainer") for step in ("sample 1", "sample 3")}
    at_events(monkeypatch, deaths)
    assert train(config, resume=True, checkpoint=elsewhere) == 0
    run = tmp_path / "run"
    own = run / "checkpoints" / "step_000003"
    froms = [event.info["resumed_from"] for event in of(run, "run")]
    assert froms == [None, str(elsewhere), str(elsewhere), str(own)]


def test_a_run_whose_trainer_dies_when_the_checkpoint_it_began_with_is_gone_says_so(
    tmp_path: Path, tiny_model: TinyModel, prompts: Path, local: list[LocalCluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, elsewhere = trained_with_a_checkpoint_elsewhere(tmp_path, tiny_model("llama"), prompts)

    def remove(_: dict[str, int]) -> None:
        shutil.rmtree(elsewhere)
        kill_local(local[-1], "trainer")

    at_events(monkeypatch, {"sample 1": remove})
    message = f"worker trainer .* died: .*{re.escape(str(elsewhere))}, is not intact any more .manifest.json is missing"
    with pytest.raises(CheckpointError, match=message):
        train(config, resume=True, checkpoint=elsewhere)


def test_a_trainer_that_dies_at_the_same_step_every_time_ends_the_run(
    tmp_path: Path, tiny_model: TinyModel, prompts: Path, local: list[LocalCluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"

    class Killer(EventLog):
        def forward(self, event: Event) -> None:
            super().forward(event)
            if (event.task, event.step) == ("sample", 2) and is_dying[-1:] != [len(local)]:
                is_dying.append(len(local))
                kill_local(local[-1], "trainer")

    is_dying: list[int] = []
    monkeypatch.setattr("tailrace.run.log.EventLog", Killer)
    newest = run / "checkpoints" / "step_000002"
    message = f"died 3 times in a row without saving a checkpoint newer than {newest}; the last: worker trainer"
    with pytest.raises(ClusterError, match=re.escape(message)) as caught:
        train(small_run(run, tiny_model("llama"), prompts, pipeline=SYNCHRONOUS), resume=False)
    assert f"go on with --resume-from {newest}" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert [event.step for event in steps_of(run)] == [0, 1]


def test_a_run_has_one_display_and_one_set_of_sinks_however_often_its_trainer_dies(
    tmp_path: Path, tiny_model: TinyModel, prompts: Path, local: list[LocalCluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    config = small_run(run, tiny_model("llama"), prompts, pipeline=SYNCHRONOUS, observe={"metrics_port": 9464})
    sinks: list[PrometheusSink] = []
    sums: list[float] = []

    class Known(PrometheusSink):
        def __init__(self, port: int) -> None:
            assert port == 9464
            super().__init__(0)  # any free port
            sinks.append(self)

        def close(self) -> None:
            sums.append(scrape(self.port)["tailrace_worker_deaths_total", "trainer"])
            sums.append(scrape(self.port)["tailrace_samples_total", ""])
            sums.append(scrape(self.port)["tailrace_resumes_total", ""])
            super().close()

    monkeypatch.setattr("tailrace.report.sinks.PrometheusSink", Known)
    monkeypatch.setattr("tailrace.report.sinks.check_port", lambda *_, **__: None)
    at_events(monkeypatch, {"sample 3": lambda _: kill_local(local[-1], "trainer")})
    assert train(config, resume=False) == 0
    assert len(sinks) == 1
    assert sums == [1.0, 8.0 * len(steps_of(run)), 1.0]


def test_a_run_that_was_finished_has_its_report_even_if_it_cannot_be_closed(
    tmp_path: Path, tiny_model: TinyModel, prompts: Path, local: list[LocalCluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    close, closed = LocalHandle.close, list[str]()

    async def fails_once(handle: LocalHandle) -> Report:
        report = await close(handle)
        closed.append(handle.name)
        if handle.name == "reward-0":
            raise ModelError("not closed")
        return report

    monkeypatch.setattr(LocalHandle, "close", fails_once)
    with pytest.raises(ModelError, match="not closed"):
        train(small_run(run, tiny_model("llama"), prompts, pipeline=SYNCHRONOUS), resume=False)
    assert sorted(closed) == ["reward-0", "rollout-0", "trainer"]
    assert (run / "report.html").exists()
    assert (run / "model" / "config.json").exists()


def test_a_worker_that_cannot_be_closed_after_the_trainers_death_is_told_of_and_the_run_goes_on(
    tmp_path: Path,
    tiny_model: TinyModel,
    prompts: Path,
    local: list[LocalCluster],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = tmp_path / "run"
    close = LocalHandle.close

    async def fails_the_first_time(handle: LocalHandle) -> Report:
        report = await close(handle)
        if handle.name == "rollout-0" and len(local) == 1:
            raise ModelError("the engine is not closed")
        return report

    monkeypatch.setattr(LocalHandle, "close", fails_the_first_time)
    at_events(monkeypatch, {"sample 1": lambda _: kill_local(local[-1], "trainer")})
    config = small_run(run, tiny_model("llama"), prompts, pipeline=SYNCHRONOUS, trainer__steps=2)
    assert train(config, resume=False) == 0
    assert len(local) == 2
    assert "not all workers could be closed: the engine is not closed" in caplog.text
    assert [event.step for event in steps_of(run)] == [0, 0, 1]


@pytest.mark.parametrize("moment", ["before_ack", "before_event"])
def test_a_trainer_that_dies_at_a_bad_moment_changes_nothing(
    tmp_path: Path,
    tiny_model: TinyModel,
    prompts: Path,
    local: list[LocalCluster],
    monkeypatch: pytest.MonkeyPatch,
    moment: str,
) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    train(small_run(whole, tiny_model("llama"), prompts), resume=False)
    hold_trainer(monkeypatch, moment)
    at_events(monkeypatch, {"held None": lambda _: kill_local(local[-1], "trainer")})
    assert train(small_run(cut, tiny_model("llama"), prompts, pipeline=SYNCHRONOUS), resume=False) == 0
    assert [event.step for event in steps_of(cut)] == [0, 1, 2, 2, 3]
    assert [event.actor for event in of(cut, "worker_died")] == ["trainer"]
    assert_same_run(whole, cut)


def test_a_run_whose_worker_cannot_start_is_none(
    tmp_path: Path, tiny_model: TinyModel, prompts: Path, local: object
) -> None:
    run = tmp_path / "run"
    engine = {"type": "adapter", "path": "tests.run.test_adapters.makes_no_engine"}
    config = small_run(run, tiny_model("llama"), prompts, pipeline=FULLY_ASYNCHRONOUS, engine=engine)
    with pytest.raises(UserError, match=r"made a str; it must make a tailrace\.engine\.base\.Engine"):
        train(config, resume=False)
    assert not run.exists()


def test_a_worker_that_cannot_start_beside_others_ends_the_run_with_its_own_error(
    tmp_path: Path, tiny_model: TinyModel, prompts: Path, local: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ModelError("the weights are broken")

    monkeypatch.setattr("tailrace.run.workers.trainer.make_run_trainer", fail)
    with pytest.raises(ModelError, match="the weights are broken"):
        train(small_run(tmp_path / "run", tiny_model("llama"), prompts, pipeline=SYNCHRONOUS), resume=False)


def test_a_worker_that_dies_while_the_run_begins_again_is_one_more_death(
    tmp_path: Path, tiny_model: TinyModel, prompts: Path, local: list[LocalCluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    start, names = LocalCluster.start, list[str]()

    async def dies_the_second_time(cluster: LocalCluster, spec: WorkerSpec, *others: Any) -> LocalHandle:
        names.append(spec.name)
        if spec.name == "trainer" and names.count("trainer") == 2:
            raise WorkerDied.of("trainer", 7, "SIGKILL")
        return await start(cluster, spec, *others)

    monkeypatch.setattr(LocalCluster, "start", dies_the_second_time)
    at_events(monkeypatch, {"sample 1": lambda _: kill_local(local[-1], "trainer")})
    assert train(small_run(run, tiny_model("llama"), prompts, pipeline=SYNCHRONOUS), resume=False) == 0
    assert names.count("trainer") == 3
    assert [event.info["how"] for event in of(run, "worker_died")] == ["killed", "SIGKILL"]
    assert [event.step for event in steps_of(run)] == [0, 0, 1, 2, 3]


def test_ctrl_c_ends_a_run_whose_trainer_has_died(
    tmp_path: Path, tiny_model: TinyModel, prompts: Path, local: list[LocalCluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"

    def both(_: dict[str, int]) -> None:
        kill_local(local[-1], "trainer")
        os.kill(os.getpid(), signal.SIGINT)

    at_events(monkeypatch, {"sample 1": both})
    assert train(small_run(run, tiny_model("llama"), prompts, pipeline=SYNCHRONOUS), resume=False) == 130
    assert len(local) == 1


def test_workers_that_compute_on_gpus_must_reserve_some(
    tmp_path: Path, tiny_model: TinyModel, prompts: Path, local: list[LocalCluster]
) -> None:
    cluster = {"trainer": {"gpus": 1}}
    config = small_run(
        tmp_path / "run", tiny_model("llama"), prompts, pipeline=SYNCHRONOUS, cluster=cluster, device="cuda:0", **KL
    )
    expected = "device is cuda:0, and cluster.rollout.gpus, cluster.reference.gpus are 0: .* cluster.rollout.gpus=1"
    with pytest.raises(ConfigError, match=expected):
        train(config, resume=False)
    assert not local


def test_threads_are_for_a_colocated_run(tmp_path: Path) -> None:
    config = small_run(tmp_path / "run", Path("model"), Path("prompts"), pipeline=SYNCHRONOUS)
    with pytest.raises(ValidationError, match=r"threads 2 is for .* colocated; .* cluster\.rollout\.threads"):
        RunConfig.model_validate({**config.model_dump(), "threads": 2})


def test_a_run_ends_when_too_many_workers_die(
    tmp_path: Path, tiny_model: TinyModel, prompts: Path, local: list[LocalCluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    config = small_run(
        run, tiny_model("llama"), prompts, pipeline=FULLY_ASYNCHRONOUS, cluster={"max_deaths": 0}, trainer__steps=50
    )
    at_events(monkeypatch, {"step 1": lambda _: kill_local(local[-1], "rollout-0")})
    with pytest.raises(ClusterError, match=r"cluster\.max_deaths is 0"):
        train(config, resume=False)
