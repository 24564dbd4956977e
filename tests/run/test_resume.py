from pathlib import Path
from typing import Any

import msgspec
import pytest

from tailrace.errors import CheckpointError, ClusterError, WorkerDied
from tailrace.run.checkpoint import RUN_FILE, RunState
from tailrace.run.resume import Restarts, Resume
from tailrace.trainer.checkpoint import CheckpointStore
from tests.helpers.runs import small_run

DEATH = WorkerDied("worker trainer-0 was killed")


def restarts(store: CheckpointStore, start: Resume | None = None, **changes: Any) -> Restarts:
    return Restarts(small_run(Path("run"), Path("model"), Path("prompts.jsonl"), **changes), store, start)


def save(store: CheckpointStore, step: int) -> Path:
    state = RunState(trained_steps=step, next_step=step, elapsed_s=1.0, prompts="")
    return store.save(step, lambda directory: _write(directory / RUN_FILE, msgspec.json.encode(state)))


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def test_a_run_goes_on_from_its_newest_checkpoint_that_is_intact(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = CheckpointStore(tmp_path, keep=5)
    runs = restarts(store)
    runs.after(DEATH)
    assert runs.point is None
    assert "killed; the run goes on from the beginning." in capsys.readouterr().err
    older, newer = save(store, 1), save(store, 2)
    (newer / RUN_FILE).write_bytes(b"")
    runs.after(DEATH)
    assert runs.point is not None
    assert runs.point.checkpoint == older
    assert f"checkpoint {newer} is damaged: {RUN_FILE} has 0 bytes" in capsys.readouterr().err


def test_a_run_that_saves_between_its_deaths_goes_on_as_often_as_its_budget_says(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=5)
    runs = restarts(store, cluster={"max_deaths": 9})
    for step in range(1, 10):
        save(store, step)
        runs.after(DEATH)
        assert runs.point == Resume.read(tmp_path / f"step_{step:06d}")
    with pytest.raises(ClusterError, match=r"10 workers died within 10 minutes, and cluster.max_deaths is 9"):
        runs.after(DEATH)


def test_a_run_that_saves_nothing_between_its_deaths_ends_at_the_third(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=5)
    runs = restarts(store, cluster={"max_deaths": 9})
    path = save(store, 1)
    for _ in range(2):
        runs.after(DEATH)
    with pytest.raises(ClusterError, match=f"3 times in a row without saving a checkpoint newer than {path};"):
        runs.after(DEATH)


def test_a_run_whose_first_checkpoint_is_gone_cannot_go_on(tmp_path: Path) -> None:
    start = Resume.read(save(CheckpointStore(tmp_path / "other", keep=1), 1))
    runs = restarts(CheckpointStore(tmp_path / "own", keep=1), start)
    runs.after(DEATH)
    assert runs.point == start
    (start.checkpoint / RUN_FILE).unlink()
    with pytest.raises(CheckpointError, match=r"step_000001, is not intact any more \(run.json .* is missing\)"):
        runs.after(DEATH)


def test_a_run_whose_queue_is_served_by_others_does_not_begin_it_again(tmp_path: Path) -> None:
    queue = {"type": "remote", "connection": "queue.json"}
    runs = restarts(CheckpointStore(tmp_path, keep=1), queue=queue)
    with pytest.raises(WorkerDied) as raised:
        runs.after(DEATH)
    assert raised.value is DEATH
