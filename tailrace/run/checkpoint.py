"""The contents of a checkpoint of a whole run.

step_000012/
  weights, optimizer, schedule, random states     written by the trainer
  queue.msgpack                                   rows with their cells, and what was consumed
  run.json                                        trained steps, data position, seconds so far
  models/NAME/                                    the same of each other model that the algorithm trains
  lengths.msgpack                                 what the predictor of lengths has learned, where there is one
  manifest.json                                   sizes and checksums of all of these
  evaluation.json                                 the figures of an evaluation of the weights, once it has ended
"""

import asyncio
import warnings
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Annotated

import msgspec

from tailrace.errors import UNREADABLE, CheckpointError, QueueError, TailraceWarning
from tailrace.events import EventLog
from tailrace.planning.lengths.base import LengthPredictor
from tailrace.planning.lengths.ranker import pack, unpack
from tailrace.registers.events import EventKind
from tailrace.trainer.base import Trainer
from tailrace.trainer.checkpoint import CheckpointStore
from tailrace.transfer.queue.base import TransferQueue

RUN_FILE = "run.json"
QUEUE_FILE = "queue.msgpack"
MODELS = "models"
MODEL_FILE = "model.json"
LENGTHS_FILE = "lengths.msgpack"

Count = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]


class RunState(msgspec.Struct, frozen=True, kw_only=True):
    """The position of a run, as a checkpoint stores it."""

    trained_steps: Count
    """Steps whose update is in the weights."""
    next_step: Count
    """First step whose prompts have not entered the queue."""
    elapsed_s: Annotated[float, msgspec.Meta(ge=0, le=1e12)]
    """Seconds that the run has taken."""
    prompts: str
    """Fingerprint of the prompts that the data position counts in."""
    unacked: list[int] = []
    """Rows that are in the weights although the queue hands them out again; see `Actor.unacked`."""
    kl_coefficients: list[Annotated[float, msgspec.Meta(ge=0, le=1e12)]] = []
    """See `KlCoefficients.saved`; none where the penalty is not adaptive."""


class ModelState(msgspec.Struct, frozen=True, kw_only=True):
    """The position of a model other than the policy, as a checkpoint stores it."""

    trained_steps: Count
    unacked: list[int] = []
    """See `RunState`."""


def read_model_state(directory: Path) -> ModelState:
    """Read the `ModelState` in `directory`, one model's directory in a verified checkpoint.

    Raises:
        CheckpointError: there is none.
    """
    path = directory / MODEL_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=ModelState)
    except (OSError, *UNREADABLE) as error:
        raise CheckpointError(
            f"{path} cannot be read ({error}); is it a checkpoint of a run whose algorithm trains {directory.name!r}?"
        ) from None


def read_run_state(checkpoint: Path) -> RunState:
    """Read the `RunState` of a verified checkpoint.

    Raises:
        CheckpointError: it holds no such record.
    """
    path = checkpoint / RUN_FILE
    try:
        state = msgspec.json.decode(path.read_bytes(), type=RunState)
        if state.next_step < state.trained_steps:
            raise msgspec.ValidationError(f"step {state.next_step} comes before {state.trained_steps} trained ones")
        return state
    except (OSError, *UNREADABLE) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); is {checkpoint} a checkpoint of a run?") from None


def save_lengths(staged: Path, lengths: LengthPredictor) -> None:
    """Write what `lengths` has learned into a directory that is made where it does not exist.

    Raises:
        CheckpointError: it cannot be written.
    """
    try:
        staged.mkdir(parents=True, exist_ok=True)
        (staged / LENGTHS_FILE).write_bytes(pack(lengths))
    except OSError as error:
        raise CheckpointError(f"{staged / LENGTHS_FILE} cannot be written: {error}") from error


def restore_lengths(checkpoint: Path, lengths: LengthPredictor) -> None:
    """Have `lengths` go on from a verified checkpoint. Warn where it cannot: the recipe may have changed."""
    path = checkpoint / LENGTHS_FILE
    if not path.exists():
        return
    try:
        unpack(path.read_bytes(), lengths)
    except ValueError as error:
        text = f"{path} is not used, and the lengths of responses are learned anew: {error}"
        warnings.warn(text, TailraceWarning, stacklevel=2)


def check_prompts(state: RunState, prompts: str) -> None:
    """Check that the prompts are those that the checkpoint's data position counts in.

    Raises:
        CheckpointError: they have changed.
    """
    if state.prompts != prompts:
        raise CheckpointError(
            "the prompts are not those of the checkpoint: prompts.source has changed since; "
            "put the old ones back, or start a new run from the exported model"
        )


class Checkpointer:
    """Saves trainer and queue together."""

    def __init__(
        self,
        store: CheckpointStore,
        trainer: Trainer,
        queue: TransferQueue,
        executor: Executor,
        log: EventLog,
        *,
        prompts: str,
    ) -> None:
        """`prompts`: the fingerprint of the prompts."""
        self._prompts = prompts
        self._store = store
        self._trainer = trainer
        self._queue = queue
        self._executor = executor
        self._log = log

    async def save(
        self,
        trained_steps: int,
        next_step: int,
        unacked: Iterable[int],
        staged: Path | None = None,
        kl_coefficients: Sequence[float] = (),
    ) -> None:
        """Write a checkpoint. The one before survives any failure. `unacked`, `kl_coefficients`: see `RunState`.

        `staged`: a directory beside the checkpoints. What is in it is moved into this checkpoint.

        Raises:
            CheckpointError: it cannot be written, for example because the disk is full.
        """
        snapshot = await self._queue.snapshot()
        state = RunState(
            trained_steps=trained_steps,
            next_step=next_step,
            elapsed_s=self._log.now(),
            prompts=self._prompts,
            unacked=sorted(unacked),
            kl_coefficients=list(kl_coefficients),
        )

        def write(directory: Path) -> None:
            self._trainer.save(directory)
            (directory / QUEUE_FILE).write_bytes(snapshot)
            (directory / RUN_FILE).write_bytes(msgspec.json.encode(state))
            for path in [] if staged is None else list(staged.iterdir()):
                path.rename(directory / path.name)

        with self._log.span(EventKind.CHECKPOINT, "trainer", step=trained_steps, version=trained_steps) as span:
            loop = asyncio.get_running_loop()
            path = await loop.run_in_executor(self._executor, lambda: self._store.save(trained_steps, write))
            span.info = {"path": str(path)}


async def restore_queue(checkpoint: Path, queue: TransferQueue) -> None:
    """Fill a new queue with the rows of a verified checkpoint.

    Raises:
        CheckpointError: it does not belong to this table of tasks.
    """
    try:
        await queue.restore((checkpoint / QUEUE_FILE).read_bytes())
    except (OSError, QueueError) as error:
        raise CheckpointError(f"{checkpoint / QUEUE_FILE} cannot be restored: {error}") from None
