import errno
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.errors import CheckpointError
from tailrace.trainer import checkpoint
from tailrace.trainer.checkpoint import MANIFEST, CheckpointStore, new_directory, step_of

NAMES = ["data.bin", "nested/more.bin"]


def write(directory: Path, content: bytes = b"0123456789") -> None:
    for name in NAMES:
        path = directory / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", keep=2)


def names(store: CheckpointStore) -> list[str]:
    return sorted(path.name for path in store.directory.iterdir())


def test_a_saved_checkpoint_is_verified_and_is_the_latest(store: CheckpointStore) -> None:
    assert store.latest() is None
    path = store.save(12, write)
    assert path == store.directory / "step_000012"
    store.verify(path)
    assert store.latest() == path
    assert (path / "nested/more.bin").read_bytes() == b"0123456789"


def test_only_the_newest_are_kept_in_the_order_of_steps(store: CheckpointStore) -> None:
    for step in (9, 10, 1_000_000):
        store.save(step, write)
    assert [path.name for path in store.list()] == ["step_000010", "step_1000000"]


def test_a_save_takes_the_place_of_this_and_later_steps_of_an_abandoned_attempt(store: CheckpointStore) -> None:
    for step in (4, 8):
        store.save(step, write)
    path = store.save(4, lambda directory: write(directory, b"again"))
    assert names(store) == ["step_000004"]
    assert (path / NAMES[0]).read_bytes() == b"again"
    store.verify(path)


def test_what_a_run_leaves_behind_is_not_its_newest_and_stays_until_it_saves(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=5)
    first, second, third = (store.save(step, write) for step in (4, 8, 12))
    store.go_on_from(second)
    assert (store.latest(), store.list()) == (second, [first, second, third])
    store.verify(third)
    new = store.save(9, write)
    assert (store.latest(), store.list()) == (new, [first, second, new])


def test_what_is_left_behind_takes_no_place_of_those_that_are_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    start, _ = (store.save(step, write) for step in (100, 120))
    store.go_on_from(start)
    new = store.save(150, write)
    assert store.list() == [start, new]


def test_a_save_that_ends_before_it_has_removed_what_was_left_behind_is_the_newest(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    older, newer = store.save(4, write), store.save(8, write)
    store.go_on_from(older)
    monkeypatch.setattr(checkpoint, "_remove", lambda _: None)
    new = store.save(5, write)
    assert (store.latest(), store.list()) == (new, [older, new, newer])


def test_a_run_may_come_back_to_what_it_left_behind(store: CheckpointStore) -> None:
    older, newer = store.save(4, write), store.save(8, write)
    store.go_on_from(older)
    store.go_on_from(newer.parent / "." / newer.name)
    assert store.of_run() == [older, newer]
    truncate(newer / NAMES[0])
    with pytest.raises(CheckpointError, match=f"resume from {older}$"):
        store.verify(newer)


def test_a_run_that_begins_elsewhere_leaves_all_behind(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "one", keep=5)
    elsewhere = CheckpointStore(tmp_path / "other", keep=1).save(8, write)
    there = [store.save(step, write) for step in (4, 8)]
    for start in (elsewhere, None):
        store.go_on_from(start)
        assert (store.latest(), store.list()) == (None, there)


def test_what_a_killed_save_has_left_goes_when_the_run_goes_on_or_ends(store: CheckpointStore) -> None:
    kept = store.save(1, write)
    for go_on in (partial(store.go_on_from, kept), store.tidy):
        (store.directory / ".partial-step_000002-abcd").mkdir()
        (store.directory / ".partial-step_000002-abcd" / "weights").touch()
        (store.directory / f".replaced-{kept.name}").mkdir()
        go_on()
        assert list(store.directory.iterdir()) == [kept]


def test_own_checkpoints_are_offered_before_those_left_behind(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=5)
    first, second, third = (store.save(step, write) for step in (4, 8, 12))
    store.go_on_from(second)
    for damaged, intact in ((second, first), (first, third)):
        truncate(damaged / NAMES[0])
        with pytest.raises(CheckpointError, match=f"resume from {intact}$"):
            store.verify(second)


ACCURACY = "eval/accuracy"


@given(st.lists(st.sampled_from([None, 0.25, 0.5, 0.75]), min_size=1, max_size=8), st.integers(1, 3))
def test_the_best_is_kept_beside_the_newest(figures: list[float | None], keep: int) -> None:
    with TemporaryDirectory() as directory:
        store = CheckpointStore(Path(directory), keep, ACCURACY)
        for step, figure in enumerate(figures):
            path = store.save(step, write)
            if figure is not None:
                store.note_evaluation(step, {ACCURACY: figure, "eval/reward": -figure})
            known = [(value, at) for at, value in enumerate(figures[: step + 1]) if value is not None]
            best = {max(known)[1]} if known else set()
            newest = {*range(max(0, step + 1 - keep), step + 1)}
            assert {step_of(one) for one in store.list()} == best | newest
            assert store.best() == ((store.directory / f"step_{max(known)[1]:06d}", max(known)[0]) if known else None)
            store.verify(path)


def test_the_best_of_what_a_run_has_left_behind_does_not_count(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, 1, ACCURACY)
    first = store.save(1, write)
    store.note_evaluation(1, {ACCURACY: 0.5})
    second = store.save(2, write)
    store.note_evaluation(2, {ACCURACY: 0.9})
    assert store.list() == [second]
    store = CheckpointStore(tmp_path, 2, ACCURACY)
    first = store.save(1, write)  # another attempt
    store.note_evaluation(1, {ACCURACY: 0.5})
    second = store.save(2, write)
    store.note_evaluation(2, {ACCURACY: 0.9})
    store.go_on_from(first)
    assert store.best() == (first, 0.5)
    store.note_evaluation(1, {ACCURACY: 0.4})
    assert store.list() == [first, second], "what is left behind stays until a save"
    assert store.save(2, write) == second
    assert store.best() == (first, 0.4), "the new checkpoint has other weights"


def test_an_evaluation_without_a_checkpoint_or_without_a_figure_changes_nothing(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, 1, ACCURACY)
    store.note_evaluation(0, {ACCURACY: 1.0})
    assert not list(tmp_path.iterdir())
    path = store.save(1, write)
    store.note_evaluation(1, {"eval/reward": 1.0})
    assert store.best() is None
    (path / "evaluation.json").write_text("{")
    assert store.best() is None
    store.save(2, write)
    assert names(store) == ["step_000002"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_save_leaves_nothing_and_prunes_nothing(
    store: CheckpointStore, error: type[BaseException]
) -> None:
    store.save(1, write)
    store.save(2, write)

    def interrupted(directory: Path) -> None:
        write(directory)
        raise error

    with pytest.raises(error):
        store.save(3, interrupted)
    assert names(store) == ["step_000001", "step_000002"]


CRASH_WHILE_REPLACING = """
import os, shutil, sys
from pathlib import Path
from tailrace.trainer.checkpoint import CheckpointStore
store = CheckpointStore(Path(sys.argv[1]), keep=2)
store.save(4, lambda directory: (directory / "data").write_bytes(b"old"))
left = iter(range(int(sys.argv[2])))
def crashing(function):
    def call(*args):
        if next(left, None) is None:
            os._exit(7)
        return function(*args)
    return call
Path.rename, shutil.rmtree = crashing(Path.rename), crashing(shutil.rmtree)
store.save(4, lambda directory: (directory / "data").write_bytes(b"new"))
"""


@pytest.mark.parametrize(("finished", "survivor"), [(0, b"old"), (1, b"old"), (2, b"new"), (3, b"new")])
def test_a_crash_while_a_checkpoint_is_replaced_loses_neither_it_nor_the_next_save(
    store: CheckpointStore, finished: int, survivor: bytes
) -> None:
    """Replacing takes four operations: move the old one aside, move the new one in, hide the old one, delete it."""
    command = [sys.executable, "-c", CRASH_WHILE_REPLACING, str(store.directory), str(finished)]
    assert subprocess.run(command, timeout=60, check=False).returncode == 7
    latest = store.latest()
    assert latest is not None
    store.verify(latest)
    assert (latest / "data").read_bytes() == survivor
    store.verify(store.save(4, write))
    assert names(store) == ["step_000004"]


def test_leftovers_of_a_crash_are_no_checkpoint_and_go_with_the_next_save(tmp_path: Path) -> None:
    script = """
import os, sys
from pathlib import Path
from tailrace.trainer.checkpoint import CheckpointStore
def crash(directory):
    (directory / "half").write_bytes(b"x")
    os._exit(7)
CheckpointStore(Path(sys.argv[1]), keep=2).save(1, crash)
"""
    assert subprocess.run([sys.executable, "-c", script, tmp_path], timeout=60, check=False).returncode == 7
    store = CheckpointStore(tmp_path, keep=2)
    assert len(names(store)) == 1
    assert store.list() == []
    store.save(2, write)
    assert names(store) == ["step_000002"]


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Let no directory be removed while the list says so, as on NFS while a file in it is open."""
    is_stuck, remove = [True], os.rmdir

    def rmdir(path: str, **options: int) -> None:
        if is_stuck[0]:
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
        remove(path, **options)

    monkeypatch.setattr(os, "rmdir", rmdir)
    return is_stuck


def test_what_cannot_be_removed_is_told_of_and_in_the_way_of_no_save(
    tmp_path: Path, stuck: list[bool], caplog: pytest.LogCaptureFixture
) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    for step in (1, 2, 3, 3, 3, 2):
        path = store.save(step, lambda directory: write(directory, b"newest"))
        assert store.list() == [path]
    store.verify(path)
    assert len(names(store)) == 6
    assert re.search(r"\.partial-step_000001-\w+ cannot be removed now: .*Directory not empty", caplog.text)
    stuck[0] = False
    store.save(4, write)
    assert names(store) == ["step_000004"]


def test_what_cannot_be_removed_does_not_hide_why_nothing_was_saved(store: CheckpointStore, stuck: list[bool]) -> None:
    def fail(directory: Path) -> None:
        write(directory)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"step_000001 cannot be written: .*Input/output error"):
            store.save(1, fail)


def test_a_disk_that_fails_when_a_checkpoint_is_in_its_place_is_named(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    force: Callable[[Path], None] = checkpoint._sync

    def fail(path: Path) -> None:
        if path == store.directory:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        force(path)

    monkeypatch.setattr(checkpoint, "_sync", fail)
    with pytest.raises(CheckpointError, match=r"step_000001 cannot be written: .*Input/output error"):
        store.save(1, write)


def truncate(path: Path) -> None:
    os.truncate(path, 4)


def alter(path: Path) -> None:
    path.write_bytes(b"0123456780")


DAMAGES: list[tuple[Callable[[Path], None], str]] = [
    (Path.unlink, r"more\.bin \(10 bytes\) is missing"),
    (truncate, r"more\.bin has 4 bytes, expected 10"),
    (alter, r"more\.bin has been altered: its checksum differs from that in manifest\.json"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES)
def test_damage_names_the_file_and_the_newest_intact_checkpoint(
    tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    intact, damaged, latest = (store.save(step, write) for step in (1, 2, 3))
    damage(damaged / NAMES[1])
    damage(latest / NAMES[1])
    with pytest.raises(CheckpointError, match=message + f"; resume from {intact}$"):
        store.verify(latest)


def test_without_an_intact_checkpoint_the_run_must_start_again(store: CheckpointStore) -> None:
    path = store.save(1, write)
    truncate(path / NAMES[0])
    with pytest.raises(CheckpointError, match="holds no intact one, so the run must start again"):
        store.verify(path)


@pytest.mark.parametrize("content", [None, b"{", b'{"data.bin": 3}'])
def test_a_missing_or_unreadable_manifest_is_damage(store: CheckpointStore, content: bytes | None) -> None:
    path = store.save(1, write)
    (path / MANIFEST).unlink()
    if content is not None:
        (path / MANIFEST).write_bytes(content)
    with pytest.raises(CheckpointError, match=MANIFEST):
        store.verify(path)


def test_a_path_that_is_no_directory_names_the_newest_checkpoint(store: CheckpointStore) -> None:
    path = store.save(1, write)
    with pytest.raises(CheckpointError, match=f"step_000009 is not a directory; the newest checkpoint is {path}"):
        store.verify(store.directory / "step_000009")


FULL_DISK = """
import resource, signal, sys
from pathlib import Path
import numpy as np
from safetensors.numpy import save_file
from tailrace.errors import CheckpointError
from tailrace.trainer.checkpoint import CheckpointStore
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
store = CheckpointStore(Path(sys.argv[1]), keep=1)
store.save(1, lambda directory: (directory / "small").write_bytes(b"x"))
try:
    store.save(2, lambda directory: {write})
except CheckpointError as error:
    print(error)
"""


@pytest.mark.parametrize(
    "write",
    ['(directory / "large").write_bytes(bytes(2**21))', 'save_file({"a": np.zeros(2**18)}, directory / "large")'],
)
def test_a_write_that_the_system_refuses_keeps_the_old_checkpoint_and_says_so(tmp_path: Path, write: str) -> None:
    script = FULL_DISK.replace("{write}", write)
    result = subprocess.run([sys.executable, "-c", script, tmp_path], capture_output=True, text=True, timeout=60)
    assert result.stderr == ""
    message = result.stdout.strip()
    assert re.search(r"step_000002 cannot be written: File too large after \d\.\d MiB", message)
    assert message.endswith(f"the newest checkpoint is {tmp_path / 'step_000001'}")
    assert "\n" not in message
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"]
    CheckpointStore(tmp_path, keep=1).verify(tmp_path / "step_000001")


def test_a_full_device_is_reported_with_the_space_that_is_free(store: CheckpointStore) -> None:
    store.save(1, write)

    def fill(directory: Path) -> None:
        with Path("/dev/full").open("wb", buffering=0) as device:
            device.write(b"x")

    with pytest.raises(CheckpointError, match=r"No space left on device .* MiB are free") as caught:
        store.save(2, fill)
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == errno.ENOSPC
    assert names(store) == ["step_000001"]


def test_a_directory_that_cannot_be_made_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"step_000001 cannot be written: .*; the run has no checkpoint in"):
        CheckpointStore(tmp_path / "file", keep=1).save(1, write)


def test_a_new_directory_leaves_alone_what_is_written_beside_it(tmp_path: Path) -> None:
    with new_directory(tmp_path / "one") as first:
        with new_directory(tmp_path / "other"):
            pass
        (first / "weights").touch()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "other"]


def test_a_directory_that_cannot_be_replaced_stays(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with new_directory(target) as partial:
        (partial / "old").touch()
    with pytest.raises(CheckpointError, match="nothing was written"), new_directory(target) as partial:
        shutil.rmtree(partial)
    assert [path.name for path in target.iterdir()] == ["old"]


def test_a_new_directory_replaces_the_old_one_only_when_it_is_complete(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with new_directory(target) as partial:
        (partial / "old").touch()
    with pytest.raises(RuntimeError), new_directory(target) as partial:
        raise RuntimeError
    assert [path.name for path in target.iterdir()] == ["old"]
    with new_directory(target) as partial:
        (partial / "new").touch()
    assert [path.name for path in target.iterdir()] == ["new"]
    assert list(tmp_path.iterdir()) == [target]
