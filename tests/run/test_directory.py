"""A run's directory belongs to one process, and a start that fails leaves nothing in it."""

import os
import stat
from asyncio import CancelledError
from collections.abc import Callable
from pathlib import Path

import pytest

from tailrace.config.load import load_config
from tailrace.config.written import written
from tailrace.errors import ClusterError, ConfigError, QueueError, UserError, WeightsError
from tailrace.events import EventFile
from tailrace.run.directory import RunDirectory
from tests.helpers.runs import small_run


def fill(run: RunDirectory) -> None:
    """Write what a start writes before the run begins."""
    run.queue.mkdir()
    (run.queue / "controller.log").write_text("ready")
    run.tensorboard.mkdir()
    (run.tensorboard / "events").write_text("none")


def fail(run: RunDirectory, error: BaseException, *, meanwhile: Callable[[RunDirectory], object] = fill) -> None:
    def work() -> None:
        with run.locked():
            meanwhile(run)
            raise error

    with pytest.raises(type(error)) as caught:
        work()
    assert caught.value is error


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("refused"),
        ClusterError("no Ray could be had"),
        WeightsError("no shared memory"),
        CancelledError(),
        KeyboardInterrupt(),
    ],
)
def test_a_start_that_comes_to_nothing_leaves_no_directory_that_was_not_there(
    tmp_path: Path, error: BaseException
) -> None:
    fail(RunDirectory(tmp_path / "runs" / "one"), error)
    assert list(tmp_path.iterdir()) == []


def test_what_was_there_before_a_start_stays(tmp_path: Path) -> None:
    empty, other = tmp_path / "empty", tmp_path / "other"
    empty.mkdir()
    (other / "wandb").mkdir(parents=True)
    (other / "wandb" / "mine").write_text("")
    (other / "notes.txt").write_text("mine")
    fail(RunDirectory(empty), ConfigError("refused"))
    fail(RunDirectory(other), ConfigError("refused"))
    assert list(empty.iterdir()) == []
    assert sorted(str(path.relative_to(other)) for path in other.rglob("*")) == ["notes.txt", "wandb", "wandb/mine"]


def test_what_is_put_there_meanwhile_stays(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "runs" / "one")
    fail(run, ConfigError("refused"), meanwhile=lambda _: (tmp_path / "runs" / "two").mkdir())
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["two"]


def test_the_logs_of_a_start_that_failed_stay(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    fail(run, QueueError("the queue was not ready, see its logs"))
    assert (run.queue / "controller.log").exists()


def test_a_run_that_has_begun_stays_whatever_ends_it(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    fail(run, ConfigError("refused"), meanwhile=lambda run: run.events.write_text(""))
    fail(run, ConfigError("refused"))
    assert sorted(path.name for path in run.path.iterdir()) == [".lock", "events.jsonl", "queue", "tensorboard"]


def test_a_lock_that_is_removed_before_it_is_had_holds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDirectory(tmp_path / "run")
    opening: Callable[..., object] = Path.open

    def open_late(path: Path, mode: str) -> object:
        file = opening(path, mode)
        path.unlink()  # as does a start that is refused at this moment
        return file

    monkeypatch.setattr(Path, "open", open_late)
    with pytest.raises(UserError, match="another process is training in"), run.locked():
        raise AssertionError("nobody else would find it locked")


@pytest.mark.parametrize("lost", ["events.jsonl", "nothing"])
def test_a_resumed_run_that_fails_at_its_start_can_be_resumed_again(tmp_path: Path, lost: str) -> None:
    run, config = RunDirectory(tmp_path), small_run(tmp_path, tmp_path / "model", tmp_path / "prompts.jsonl")
    with run.begun(config, resumed=False):
        run.events.touch()
    (tmp_path / lost).unlink(missing_ok=True)
    with pytest.raises(ConfigError, match="no room"), run.begun(config, resumed=True):
        raise ConfigError("the engine has no room")
    run.check_same(config)


def test_a_new_run_that_fails_at_its_start_is_none(tmp_path: Path) -> None:
    run, config = RunDirectory(tmp_path), small_run(tmp_path, tmp_path / "model", tmp_path / "prompts.jsonl")

    def begin() -> None:
        with run.begun(config, resumed=False):
            run.events.touch()
            raise ConfigError("the engine has no room")

    with pytest.raises(ConfigError, match="no room"):
        begin()
    assert list(tmp_path.iterdir()) == []


def test_what_a_run_writes_of_its_recipe_is_the_owners_and_read_back(tmp_path: Path) -> None:
    run, config = RunDirectory(tmp_path), small_run(tmp_path, tmp_path / "model", tmp_path / "prompts.jsonl")
    config = load_config(written(config), [r"prompts.system_prompt='\${x} é'", "observe.tensorboard=false"])
    old = os.umask(0o022)
    try:
        with run.begun(config, resumed=False):
            EventFile(run.events).close()
    finally:
        os.umask(old)
    assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {
        "config.yaml": 0o600,
        "events.jsonl": 0o600,
    }
    assert load_config(run.config) == config
    run.check_same(config)


def test_a_configuration_that_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, config = RunDirectory(tmp_path), small_run(tmp_path, tmp_path / "model", tmp_path / "prompts.jsonl")

    def fails(values: object) -> str:
        raise ValueError("no such character")

    monkeypatch.setattr("tailrace.run.directory.write_yaml", fails)
    with pytest.raises(ValueError, match="no such character"), run.begun(config, resumed=False):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("prompts.split_seed=5", "prompts.split_seed cannot change when a run is resumed: it was 0 and is 5"),
        ("model.revision=x", "model.revision cannot change when a run is resumed: it was null and is 'x'"),
        (
            "algorithm.kl.coefficient=0.1",
            "the tasks of the algorithm cannot change when a run is resumed: it was ['rollout', 'reward', 'advan",
        ),
        ("prompts.chat_template_arguments.token=y", "prompts cannot change when a run is resumed, and a secret in it"),
    ],
)
def test_what_cannot_change_is_named_without_secrets(tmp_path: Path, override: str, says: str) -> None:
    run, config = RunDirectory(tmp_path), small_run(tmp_path, tmp_path / "model", tmp_path / "prompts.jsonl")
    config = load_config(written(config), ["prompts.chat_template_arguments.token=x"])
    with run.begun(config, resumed=False):
        pass
    with pytest.raises(ConfigError) as caught:
        run.check_same(load_config(written(config), [override]))
    assert says in str(caught.value)
