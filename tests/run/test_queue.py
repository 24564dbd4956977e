"""A run's queue is at the configured place, has the run's table, and survives deaths of its processes."""

import json
import os
import signal
import subprocess
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import yaml

from tailrace.config.queue_table import TableConfig, TaskConfig
from tailrace.config.transfer import LocalQueueConfig, RemoteQueueConfig, ServiceQueueConfig
from tailrace.errors import ConfigError, GroupExists, PeerLost, QueueError, TailraceError, UserError
from tailrace.run import train as run_module
from tailrace.run.directory import RunDirectory
from tailrace.run.queue import check_queue, client_options, open_queue, run_table
from tailrace.run.train import train
from tailrace.trainer.checkpoint import CheckpointStore
from tailrace.transfer.queue.address import QueueAddress
from tailrace.transfer.queue.client.remote import RemoteQueue
from tailrace.transfer.queue.client.sync_queue import SyncQueue
from tailrace.transfer.queue.local.queue import LocalQueue
from tailrace.transfer.queue.processes import vitals
from tailrace.transfer.queue.processes.supervisor import QueueProcesses
from tailrace.transfer.queue.rows.table import check_table
from tailrace.transfer.queue.table_factory import make_tasks
from tailrace.transfer.wire.sockets import host_id
from tests.conftest import TinyModel
from tests.helpers.runs import learned, small_run, steps_of, write_prompts
from tests.transfer.processes.test_supervisor import TABLE, queue
from tests.transfer.tables import group, outputs, tokens

OTHER_TASK = TableConfig(tasks=(*TABLE.tasks[:1], TaskConfig(name="sink", reads=("prompt_ids",))))
OTHER_COLUMNS = TABLE.model_copy(update={"columns": {**TABLE.columns, "colour": TABLE.columns["prompt"]}})


@pytest.mark.parametrize(
    ("pipeline", "policy"),
    [
        ({}, {"tokens": None, "window": 1}),
        ({"streaming": True}, {"tokens": 64, "window": 8}),
        ({"streaming": True, "in_order": True}, {"tokens": 64, "window": 1}),
    ],
)
def test_the_actor_gathers_micro_batches_when_streaming_and_mini_batches_otherwise(
    tmp_path: Path, pipeline: dict[str, Any], policy: dict[str, Any]
) -> None:
    config = small_run(tmp_path, Path("model"), Path("prompts.jsonl"), pipeline=pipeline)
    table = run_table(config)
    assert [task.name for task in table.tasks] == ["rollout", "reward", "advantage", "actor"]
    assert table.tasks[-1].policy.model_dump(include={"tokens", "window"}) == policy
    check_table(make_tasks(table), table.columns)


def test_every_process_of_a_run_uses_the_queue_as_its_configuration_says() -> None:
    remote = RemoteQueueConfig(connection="c", timeout_s=7.0, client_limit_s=5.0, shared_memory=False)
    assert client_options(remote) == {"timeout_s": 7.0, "limit_s": 5.0, "shared_memory": False}
    service = ServiceQueueConfig(timeout_s=7.0, client_limit_s=5.0)
    assert client_options(service) == {"timeout_s": 7.0, "limit_s": 5.0, "shared_memory": True}


async def test_a_local_queue_is_in_this_process(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        opened = await open_queue(LocalQueueConfig(), TABLE, tmp_path / "queue", stack)
        assert isinstance(opened.queue, LocalQueue)
        assert opened.address is None
    assert not (tmp_path / "queue").exists()


async def test_a_service_is_in_processes_of_its_own_for_as_long_as_the_run(tmp_path: Path) -> None:
    config = ServiceQueueConfig.model_validate({"units": 1, "storage": {"type": "memory"}})
    async with AsyncExitStack() as stack:
        opened = await open_queue(config, TABLE, tmp_path / "queue", stack)
        assert isinstance(opened.queue, RemoteQueue)
        assert opened.address is not None
        assert [unit.name for unit in (await opened.queue.stats()).units] == ["unit-0"]


async def test_nobody_waits_for_a_service_that_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vitals, "MAX_DEATHS", 0)
    config = ServiceQueueConfig.model_validate({"units": 1, "storage": {"type": "memory"}, "client_limit_s": 3600.0})
    starting = QueueProcesses(config, TABLE, tmp_path / "queue")
    monkeypatch.setattr("tailrace.run.queue.queue_processes", lambda *_: starting)
    with pytest.raises(QueueError, match=r"unit-0 of the queue ended \(SIGKILL.*: given up"):
        await _claim_while_a_unit_dies(config, starting, tmp_path)


async def _claim_while_a_unit_dies(config: ServiceQueueConfig, processes: QueueProcesses, directory: Path) -> None:
    async with AsyncExitStack() as stack:
        opened = await open_queue(config, TABLE, directory, stack)
        os.kill(processes.pids["unit-0"], signal.SIGKILL)
        await opened.queue.claim("rollout")


async def test_a_remote_queue_is_one_that_runs_already_and_goes_on_after_the_run(tmp_path: Path) -> None:
    async with queue(tmp_path) as processes:
        config = RemoteQueueConfig(connection=str(processes.connection))
        for _ in range(2):
            async with AsyncExitStack() as stack:
                opened = await open_queue(config, TABLE, tmp_path / "unused", stack)
                assert (await opened.queue.stats()).rows == 0


async def test_a_run_names_its_own_limit_to_a_remote_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named: list[float] = []

    class Client(RemoteQueue):
        def __init__(self, address: QueueAddress, *, limit_s: float = 30.0, **options: Any) -> None:
            named.append(limit_s)
            super().__init__(address, limit_s=limit_s, **options)

    monkeypatch.setattr("tailrace.run.queue.RemoteQueue", Client)
    async with queue(tmp_path) as processes, AsyncExitStack() as stack:
        config = RemoteQueueConfig(connection=str(processes.connection), client_limit_s=7.0)
        await open_queue(config, TABLE, tmp_path / "unused", stack)
    assert named == [7.0]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (OTHER_TASK, r"its task 'sink' is \['response_ids'\] -> \[\], the run's \['prompt_ids'\] -> \[\]"),
        (OTHER_COLUMNS, "its column 'colour' holds nothing, the run's str"),
        (TableConfig(tasks=TABLE.tasks[:1]), "its task 'sink' is .*, the run's missing"),
    ],
)
def test_a_remote_queue_with_another_table_is_refused(tmp_path: Path, table: TableConfig, message: str) -> None:
    with queue(tmp_path) as processes, pytest.raises(ConfigError, match=message):
        check_queue(RemoteQueueConfig(connection=str(processes.connection)), table)


def test_a_remote_queue_that_does_not_answer_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tailrace.run.queue._GREETING_LIMIT_S", 0.1)
    path = tmp_path / "connection.json"
    QueueAddress(endpoints=[f"ipc://{tmp_path}/socket"], host=host_id(), token=bytes(32)).write(path)
    with pytest.raises(
        UserError, match=r"queue of .*connection\.json has not .* 0\.1 s: is `tailrace queue serve` running\?"
    ):
        check_queue(RemoteQueueConfig(connection=str(path)), TABLE)


def test_a_remote_queue_without_its_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"connection\.json"):
        check_queue(RemoteQueueConfig(connection=str(tmp_path / "connection.json")), TABLE)


def test_a_remote_queue_that_was_used_or_closed_is_refused(tmp_path: Path) -> None:
    with queue(tmp_path) as processes, SyncQueue(processes.address, name="test") as other:
        config = RemoteQueueConfig(connection=str(processes.connection))
        check_queue(config, TABLE)
        other.put(group(0))
        with pytest.raises(ConfigError, match=r"has held rows, .* `tailrace queue serve` and a new --directory"):
            check_queue(config, TABLE)
        for task, cells in (("rollout", {"response_ids": tokens(1)}), ("sink", {})):
            claim = other.claim(task)
            other.ack(claim, outputs(claim, **cells))
        with pytest.raises(ConfigError, match="has held rows"):
            check_queue(config, TABLE)
        other.close()
        with pytest.raises(ConfigError, match="was closed"):
            check_queue(config, TABLE)


def test_a_served_queue_is_for_one_run_and_to_resume_it_takes_another(tmp_path: Path, tiny_model: TinyModel) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl")

    def run(name: str, steps: int, served: QueueProcesses, *, resume: bool = False) -> int:
        remote = {"type": "remote", "connection": str(served.connection)}
        config = small_run(tmp_path / name, tiny_model("llama"), prompts, queue=remote, trainer__steps=steps)
        return train(config, resume=resume)

    table = run_table(small_run(tmp_path, tmp_path, prompts))
    with queue(tmp_path / "first", table=table) as first, queue(tmp_path / "second", table=table) as second:
        assert run("run", 1, first) == 0
        for name, resume in (("other", False), ("run", True)):
            with pytest.raises(ConfigError, match="is for one run"):
                run(name, 2, first, resume=resume)
        assert not (tmp_path / "other").exists()
        assert run("run", 2, second, resume=True) == 0
    assert [event.step for event in steps_of(tmp_path / "run")] == [0, 1]


REMOTE = {"type": "remote", "connection": "q/connection.json"}


def failing(directory: Path, queue: dict[str, Any], error: Exception, monkeypatch: pytest.MonkeyPatch) -> str:
    """The message of a run that ends with `error`."""

    async def fail(*_: object) -> int:
        raise error

    monkeypatch.setattr("tailrace.run.train._Run.to_end", fail)
    monkeypatch.setattr(run_module, "check_recipe", MagicMock())
    with pytest.raises(TailraceError) as caught:
        train(small_run(directory, Path("model"), Path("prompts.jsonl"), queue=queue), resume=False)
    return str(caught.value)


def test_a_run_whose_served_queue_has_ended_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lost = PeerLost("ipc://s has not answered within 30 s")
    said = failing(tmp_path, REMOTE, lost, monkeypatch)
    assert said.startswith(
        "the queue of q/connection.json does not answer any more: ipc://s has not answered within 30 s;"
    )
    assert said.endswith("begin again, without a checkpoint: queue.connection=DIRECTORY/connection.json")
    CheckpointStore(tmp_path / "checkpoints", keep=1).save(7, lambda _: None)
    (checkpoint,) = (tmp_path / "checkpoints").iterdir()
    said = failing(tmp_path, REMOTE, lost, monkeypatch)
    command = f"tailrace train {tmp_path}/config.yaml --resume queue.connection=DIRECTORY/connection.json"
    assert said.endswith(f"`tailrace queue serve` and a new --directory, and go on from {checkpoint}: {command}")


def test_a_run_that_shares_its_queue_with_another_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = failing(tmp_path, REMOTE, GroupExists("group 0 is in the queue already"), monkeypatch)
    assert said.startswith(
        "another run uses the queue of q/connection.json: group 0 is in the queue already; serve one"
    )


@pytest.mark.parametrize(("kind", "error"), [("service", PeerLost("gone")), ("remote", QueueError("gone"))])
def test_another_error_of_the_queue_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, error: QueueError
) -> None:
    assert failing(tmp_path, REMOTE if kind == "remote" else {"type": kind}, error, monkeypatch) == "gone"


def test_a_directory_in_which_another_process_trains_gets_no_queue(tmp_path: Path, tiny_model: TinyModel) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl")
    config = small_run(tmp_path / "run", tiny_model("llama"), prompts, queue={"type": "service"})
    with (
        RunDirectory(tmp_path / "run").locked(),
        pytest.raises(UserError, match="another process is training in"),
    ):
        train(config, resume=False)
    assert not (tmp_path / "run" / "queue").exists()


def test_a_run_learns_the_same_wherever_its_queue_is_and_goes_on_with_another(
    tmp_path: Path, tiny_model: TinyModel
) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl")
    service = {"type": "service", "storage": {"type": "arena", "max_bytes": 2**26}}

    def run(
        name: str, steps: int, queue: dict[str, Any], *, resume: bool = False
    ) -> dict[int | None, dict[str, float]]:
        config = small_run(tmp_path / name, tiny_model("llama"), prompts, queue=queue, trainer__steps=steps)
        assert train(config, resume=resume) == 0
        return {event.step: learned(event) for event in steps_of(tmp_path / name)}

    expected = run("local", 4, {"type": "local"})
    assert run("service", 4, service) == expected
    run("resumed", 2, service)
    assert run("resumed", 4, service, resume=True) == expected
    two = {**service, "controllers": 2}
    assert run("two", 2, two).items() <= expected.items()
    assert run("two", 4, service, resume=True) == expected


@pytest.mark.parametrize(("placement", "queue"), [("colocated", "local"), ("separated", "service")])
def test_a_run_whose_recipe_chooses_policies_ends_with_every_step(
    tmp_path: Path, tiny_model: TinyModel, local: object, placement: str, queue: str
) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl")
    policies = {
        "rollout": {"type": "first_in", "max_rows": 3},
        "reward": {"type": "whole_groups", "max_groups": 2},
        "advantage": {"type": "whole_groups", "max_groups": 1},
        "actor": {"type": "token_budget", "window": 8},
    }
    config = small_run(
        tmp_path / "run",
        tiny_model("llama"),
        prompts,
        queue={"type": queue, "policies": policies},
        pipeline={"placement": placement},
        trainer__steps=2,
    )
    assert train(config, resume=False) == 0
    assert [event.step for event in steps_of(tmp_path / "run")] == [0, 1]
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["queue"]["policies"].keys() == policies.keys()


STEPS = 6


@pytest.mark.parametrize(
    ("algorithm", "replicas", "kills"),
    [
        ("grpo", 1, {"sample 1": ["unit-0", "unit-1"], "actor 3": ["unit-0", "unit-1"]}),
        ("reinforce_plus_plus", 1, {"sample 1": ["unit-0", "unit-1"], "advantage 1": ["unit-0"]}),
        ("grpo", 2, {"sample 1": ["unit-0"], "actor 2": ["unit-1"], "reward 3": ["controller"], "step 4": ["unit-0"]}),
    ],
    ids=["every row is lost", "a step comes again in part", "each row is on another unit"],
)
def test_a_run_trains_on_each_row_once_and_ends_though_processes_of_its_queue_are_killed(
    tmp_path: Path, tiny_model: TinyModel, algorithm: str, replicas: int, kills: dict[str, list[str]]
) -> None:
    """The last steps may meet rows of earlier steps that came again, and must not train on them."""
    prompts = write_prompts(tmp_path / "prompts.jsonl")
    storage = {"type": "arena", "max_bytes": 2**26}
    queue = {"type": "service", "replicas": replicas, "storage": storage}
    config = small_run(
        tmp_path / "run",
        tiny_model("llama"),
        prompts,
        queue=queue,
        algorithm={"type": algorithm, "group_size": 4},
        pipeline={"streaming": True},
        trainer__steps=STEPS,
    )
    command = [sys.executable, "-m", "tests.helpers.killed_run", config.model_dump_json(), json.dumps(kills)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stderr
    trained = json.loads(ended.stdout.splitlines()[-1])
    assert trained == [list(range(8 * step, 8 * step + 8)) for step in range(STEPS)]
    assert [event.step for event in steps_of(tmp_path / "run")] == list(range(STEPS))
