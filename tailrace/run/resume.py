"""Where a run goes on: at its start, and after the death of its trainer or of Ray."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from tailrace.cluster.pool import DeathBudget
from tailrace.config.run import RunConfig
from tailrace.config.transfer import RemoteQueueConfig
from tailrace.errors import CheckpointError, ClusterError
from tailrace.registers import run_files
from tailrace.run.checkpoint import RunState, read_run_state
from tailrace.run.directory import RunDirectory
from tailrace.trainer.checkpoint import CheckpointStore, find_damage

_MAX_IN_VAIN = 3
"""Deaths in a row without a new checkpoint between them: the same would happen again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """A verified checkpoint from which a run goes on."""

    checkpoint: Path
    state: RunState

    @classmethod
    def read(cls, checkpoint: Path) -> Self:
        """Read the state in an intact checkpoint.

        Raises:
            CheckpointError: see `read_run_state`.
        """
        return cls(checkpoint=checkpoint, state=read_run_state(checkpoint))


def find_start(directory: RunDirectory, store: CheckpointStore, checkpoint: Path | None) -> Resume:
    """Find the checkpoint from which a run is resumed: `checkpoint`, or the newest one of the run in `directory`.

    Raises:
        CheckpointError: there is none, or it is damaged. The message names another one where there is one.
    """
    if checkpoint is not None:
        if newest := CheckpointStore(checkpoint / run_files.CHECKPOINTS, keep=store.keep).latest():
            raise CheckpointError(f"{checkpoint} is a run, and no checkpoint; its newest is {newest}")
        CheckpointStore(checkpoint.parent, keep=store.keep).verify(checkpoint)
        return Resume.read(checkpoint)
    path = store.latest()
    if path is None:
        which, fix = "", "start again in a new output_dir"
        if left := store.list():
            which = f" but those that the run has left behind, such as {left[-1]}"
            fix = "choose one with --resume-from"
        raise CheckpointError(f"output_dir {directory.path} holds no checkpoint{which}; {fix}")
    store.verify(path)
    return Resume.read(path)


class Restarts:
    """Decides after each death whether the run goes on, and from which checkpoint."""

    def __init__(self, config: RunConfig, store: CheckpointStore, start: Resume | None) -> None:
        """`start`: the checkpoint that the run begins with; None for a run that begins at step 0."""
        self.budget = DeathBudget(config.cluster.max_deaths)
        self.point = start
        """The checkpoint that the present attempt began with; None for the beginning of the run."""
        self._config = config
        self._store = store
        self._start = start
        self._in_vain = 0
        """Attempts in a row that began at `point` and died."""

    def after(self, death: ClusterError) -> None:
        """Choose the `point` of the next attempt.

        Raises:
            ClusterError: the run cannot go on: its queue is not its own to begin again, too many workers have died,
                or too many attempts in a row have saved no checkpoint.
            CheckpointError: the run began with a checkpoint of another run, which is now gone or damaged.
        """
        if isinstance(self._config.queue, RemoteQueueConfig):
            raise death
        self.budget.spend(death)
        newest = self._newest(death)
        self._in_vain = self._in_vain + 1 if newest == self.point else 1
        self.point = newest
        path = newest.checkpoint if newest else None
        if self._in_vain == _MAX_IN_VAIN:
            what, fix = (f" newer than {path}", f"--resume-from {path}") if path else ("", "a new output_dir")
            raise ClusterError(
                f"the run has died {_MAX_IN_VAIN} times in a row without saving a checkpoint{what}; the last: {death}; "
                f"mend that, or lower checkpoint.every ({self._config.checkpoint.every}), and go on with {fix}"
            ) from death
        print(f"{death}; the run goes on from {path or 'the beginning'}.", file=sys.stderr)

    def _newest(self, death: ClusterError) -> Resume | None:
        """Return the newest intact checkpoint of the run, else the one that the run began with.

        Each damaged one is passed over with a line on stderr.
        """
        for path in reversed(self._store.of_run()):
            if problem := find_damage(path):
                print(f"checkpoint {path} is damaged: {problem}", file=sys.stderr)
            else:
                return Resume.read(path)
        if self._start is not None and (problem := find_damage(self._start.checkpoint)):
            raise CheckpointError(
                f"{death}; the checkpoint that the run began with, {self._start.checkpoint}, is not intact any more "
                f"({problem}), so it cannot go on; start from another with --resume-from"
            ) from death
        return self._start
