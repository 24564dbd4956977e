"""The directory of a run; `tailrace.registers.run_files` lists its files."""

import fcntl
import os
import shutil
import tempfile
from asyncio import CancelledError
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

from tailrace.algorithms.factory import make_run_algorithm
from tailrace.config.base import Config
from tailrace.config.load import load_config
from tailrace.config.recipe_text import in_yaml, write_yaml
from tailrace.config.run import RunConfig
from tailrace.config.written import shown, written
from tailrace.errors import CheckpointError, ConfigError, QueueError, TailraceError, UserError, quoted
from tailrace.events import read_events
from tailrace.planning.foretold import content_of
from tailrace.registers import run_files
from tailrace.report.samples import read_samples


class RunDirectory:
    """The paths of a run, and the rules for making and reentering its directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / run_files.CONFIG
        self.events = path / run_files.EVENTS
        self.samples = path / run_files.SAMPLES
        self.trace = path / run_files.WORKLOAD_TRACE
        self.checkpoints = path / run_files.CHECKPOINTS
        self.staging = self.checkpoints / run_files.STAGING
        self.tensorboard = path / run_files.TENSORBOARD
        self.model = path / run_files.MODEL
        self.queue = path / run_files.QUEUE
        self.report = path / run_files.REPORT
        self.evidence = path / run_files.EVIDENCE
        self.plan = path / run_files.PLAN
        self._lock = path / run_files.LOCK

    def check_new(self) -> None:
        """Raise a UserError where the directory holds a run already."""
        try:
            taken = self.events.exists()
        except OSError as error:
            raise UserError(f"output_dir {self.path} cannot be used: {error.strerror}") from None
        if taken:
            can_go_on = any(self.checkpoints.glob("step_*"))
            fix = "go on with it (--resume) or " if can_go_on else "it has saved no checkpoint to go on with, so "
            raise UserError(f"output_dir {self.path} holds a run already; {fix}choose another output_dir")

    def check_makeable(self, option: str = "output_dir") -> None:
        """Raise a UserError where the directory, which `option` names, cannot be made or written to.

        Leaves nothing behind.
        """
        around = [path for path in (self.path, *self.path.parents) if not path.exists()]
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self.path).close()
        except OSError as error:
            raise _refused(self.path, error, option) from None
        finally:
            _remove((), around)

    def check_resumed(self, config: RunConfig, checkpoint: Path | None) -> None:
        """Check that a run can go on here, or that a new one can begin here with the checkpoint of another.

        `checkpoint`: the one to go on from; by default the newest of the run in this directory.

        Raises:
            UserError: there is no run to go on with, or `config` differs from that run's where it must not.
        """
        if checkpoint is None or self.config.exists():
            self.check_same(config)
            return
        self.check_new()
        other = RunDirectory(checkpoint.absolute().parent.parent)
        if other.config.exists():
            other.check_same(config)

    def check_same(self, config: RunConfig) -> None:
        """Raise a UserError where there is no run, or `config` differs from the run's where it must not."""
        try:
            known = self.config.exists()
        except OSError as error:
            raise CheckpointError(f"{self.config} cannot be read: {error.strerror}") from None
        if not known:
            raise CheckpointError(f"output_dir {self.path} holds no run to resume; leave out --resume")
        before = load_config(self.config)
        was, now = _identity(before), _identity(config)
        for key in was:
            if was[key] != now[key]:
                values = (
                    (shown(before)[key], shown(config)[key]) if isinstance(was[key], Config) else (was[key], now[key])
                )
                raise ConfigError(_changed(key, *values))
        old, new = before.pipeline.max_staleness, config.pipeline.max_staleness
        if new < old:
            raise ConfigError(
                f"pipeline.max_staleness cannot be lowered from {old} to {new} when a run is resumed: its queue may "
                f"hold responses that were let in under {old}; give {old} or more"
            )

    def plan_of(self, config: RunConfig) -> Path | None:
        """Return the file of a run's prediction: the copy that the run here has, or the one that a recipe names."""
        if config.observe.plan is None:
            return None
        return self.plan if self.events.exists() and self.plan.exists() else Path(config.observe.plan)

    def plan_given(self, config: RunConfig) -> bytes | None:
        """Return the prediction that a recipe names; None where it names none, or the run here has one already.

        Raises:
            PlanError: it cannot be read, or is no prediction.
        """
        plan = self.plan_of(config)
        if plan is None or plan == self.plan:
            return None
        return content_of(plan, name=f"observe.plan {quoted(str(config.observe.plan))}")

    def check_events(self) -> None:
        """Check that a resumed run can append to its events and samples. Both files may be missing.

        Raises:
            UserError: a line of them is broken, or they cannot be read.
        """
        if self.events.exists():
            read_events(self.events)
        if self.samples.exists():
            read_samples(self.samples)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Make the directory and hold it for this process.

        A start that fails or is interrupted within the block leaves nothing there, except the logs of a queue that
        failed.

        Raises:
            UserError: it cannot be made, or another process trains in it.
        """
        parts = (self._lock, self.queue, self.tensorboard, self.path / run_files.WANDB)
        try:
            new = [path for path in parts if not path.exists()]
            around = [path for path in (self.path, *self.path.parents) if not path.exists()]
            self.path.mkdir(parents=True, exist_ok=True)
            lock = self._lock.open("w")
        except OSError as error:
            raise _refused(self.path, error) from None
        with lock:
            self._hold(lock)
            try:
                yield
            except (TailraceError, CancelledError, KeyboardInterrupt) as error:
                if not (self.events.exists() or isinstance(error, QueueError)):
                    _remove(new, around)
                raise

    def _hold(self, lock: IO[str]) -> None:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not (self._lock.exists() and os.path.samestat(os.fstat(lock.fileno()), self._lock.stat())):
                raise BlockingIOError  # the other process's start was refused just now, and the file removed
        except BlockingIOError:
            raise UserError(f"another process is training in {self.path}; wait for it or stop it") from None
        except OSError as error:  # a file system without locks, or the other process has removed the file just now
            raise _refused(self.path, error) from None

    def _write_config(self, config: RunConfig) -> None:
        """Write the configuration readable by its owner alone: the recipe may hold secrets."""
        descriptor, name = tempfile.mkstemp(prefix=".config.", dir=self.path)  # a private file
        try:
            with open(descriptor, "w", encoding="utf-8") as file:
                file.write(write_yaml(written(config)))
            Path(name).replace(self.config)
        finally:
            Path(name).unlink(missing_ok=True)  # where writing failed

    @contextmanager
    def holding(self, content: bytes | None, name: str = run_files.GIVEN_PROMPTS) -> Iterator[None]:
        """Write what a program gives to the file that the configuration names. A start that fails removes it.

        `name`: the file, in this directory.

        Raises:
            UserError: it cannot be written, or the run began with another content.
        """
        if content is None:
            yield
            return
        file = self.path / name
        around = [path for path in file.parents if not path.exists()]
        try:
            if self.events.exists() and file.exists() and file.read_bytes() != content:
                raise UserError(f"{name} differs from the file that the run in {self.path} began with; give the same")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
        except OSError as error:
            raise _refused(self.path, error) from None
        try:
            yield
        except BaseException:
            if not self.events.exists():
                _remove([file], around)
            raise

    @contextmanager
    def begun(self, config: RunConfig, *, resumed: bool) -> Iterator[None]:
        """Write the configuration, also that of a resumed run, and delete evidence of an earlier failure.

        A new run that fails within the block does not count as begun: the files that it has written are deleted.
        """
        new = not resumed and not self.events.exists()
        try:
            self.evidence.unlink(missing_ok=True)
            self._write_config(config)
        except OSError as error:
            raise UserError(f"{self.config} cannot be written: {error.strerror}") from None
        with ExitStack() as failed:
            if new:
                failed.callback(self.events.unlink, missing_ok=True)
                failed.callback(self.samples.unlink, missing_ok=True)
                failed.callback(self.trace.unlink, missing_ok=True)
                failed.callback(self.config.unlink, missing_ok=True)
            yield
            failed.pop_all()


def _refused(path: Path, error: OSError, option: str = "output_dir") -> UserError:
    return UserError(f"{option} {path} cannot be written: {error.strerror}; choose another {option}")


def _remove(parts: Iterable[Path], around: Iterable[Path]) -> None:
    """Remove `parts` with their contents, then the directories `around` them, from the innermost."""
    with suppress(OSError):  # something else was put there, and stays
        for path in parts:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        for path in around:
            path.rmdir()


def _changed(key: str, was: object, now: object) -> str:
    """The error message for a value that differs, or for one inside it. Both are in the form that may be shown."""
    if was == now:
        return f"{key} cannot change when a run is resumed, and a secret in it has"
    if isinstance(was, dict) and isinstance(now, dict):
        name = next(name for name in was | now if name not in was or name not in now or was[name] != now[name])
        return _changed(f"{key}.{name}", was.get(name), now.get(name))
    return f"{key} cannot change when a run is resumed: it was {in_yaml(was)} and is {in_yaml(now)}"


def _identity(config: RunConfig) -> dict[str, object]:
    """The values that a resumed run must keep: data position, queue and optimizer have no meaning under others."""
    return {
        "seed": config.seed,
        "model": config.model,
        "prompts": config.prompts,
        "algorithm.group_size": config.algorithm.group_size,
        "the tasks of the algorithm": [task.name for task in make_run_algorithm(config).tasks],
        "trainer.train_batch_size": config.trainer.train_batch_size,
        "trainer.mini_batch_size": config.mini_batch_size,
    }
