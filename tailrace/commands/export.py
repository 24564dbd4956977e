"""`tailrace export`: turns a checkpoint of a run into a model directory that transformers loads."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from tailrace.config.load import load_config
from tailrace.config.run import RunConfig
from tailrace.errors import CheckpointError, UserError
from tailrace.host.compute import prepare_torch
from tailrace.models.resolve import resolve_model
from tailrace.run.directory import RunDirectory
from tailrace.trainer.checkpoint import CheckpointStore, step_of
from tailrace.trainer.export import export_dtype
from tailrace.trainer.factory import make_run_trainer

_log = logging.getLogger(__name__)


def export(run: Path, *, step: int | None = None, output: Path | None = None, force: bool = False) -> Path:
    """Write the model of the checkpoint of `step`, by default the newest, to `output`, and return the directory.

    The default of `output` is `RUN/model` for the newest checkpoint, and `RUN/model-step-N` for a given step.

    Args:
        force: replace the directory where it exists.

    Raises:
        UserError: there is no such run or checkpoint, or the directory exists. Nothing is written.
    """
    directory = RunDirectory(run)
    config = run_config(directory)
    checkpoint = find_checkpoint(directory, step)
    target = output or (directory.model if step is None else run / f"model-step-{step}")
    if target.exists() and not force:
        raise UserError(f"{target} exists; give another directory with --output, or replace it with --force")
    if target.exists() and not (target / "config.json").is_file() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target} is no model directory, so it is not replaced; give another one with --output")
    _export(config, checkpoint, target)
    return target


def run_config(directory: RunDirectory) -> RunConfig:
    """Return the configuration that the run was made with.

    Raises:
        UserError: there is no run.
    """
    if not directory.config.is_file():
        raise UserError(f"{directory.path} is no directory of a run: it has no {directory.config.name}")
    return load_config(directory.config)


def find_checkpoint(directory: RunDirectory, step: int | None) -> Path:
    """Return the checkpoint of `step`, after verifying it; by default the newest of the run.

    Raises:
        CheckpointError: the run has no such checkpoint, or has left it behind, or it is damaged. The message lists the
            steps of the run's checkpoints.
    """
    store = CheckpointStore(directory.checkpoints, keep=1)
    of_run = {step_of(path): path for path in store.of_run()}
    checkpoint = store.latest() if step is None else of_run.get(step)
    if checkpoint is None:
        raise CheckpointError(f"{directory.path} has {_missing(store, step)}")
    store.verify(checkpoint)
    return checkpoint


def _missing(store: CheckpointStore, step: int | None) -> str:
    """Describe the missing checkpoint, and the checkpoints that there are."""
    steps = ", ".join(str(step_of(path)) for path in store.of_run())
    left = next((path for path in reversed(store.list()) if step in (None, step_of(path))), None)
    parts = [
        "no checkpoint yet" if step is None else f"no checkpoint of step {step}",
        f"it has those of {steps}" if steps else "",
        f"{left} is of an attempt that the run has left behind; train with --resume-from to go on with that"
        if left
        else "",
    ]
    return "; ".join(filter(None, parts))


@contextmanager
def exported_checkpoint(run: Path, step: int, *, device: str, threads: int | None) -> Iterator[Path]:
    """Yield a model directory of the checkpoint of `step`, for as long as the block lasts.

    `device` and `threads`: of the export, in place of the run's.

    Raises:
        UserError: see `export`.
    """
    directory = RunDirectory(run)
    config, checkpoint = run_config(directory), find_checkpoint(directory, step)
    with TemporaryDirectory(prefix="tailrace-eval-") as temporary:
        target = Path(temporary) / "model"
        _export(config.model_copy(update={"device": device, "threads": threads}), checkpoint, target)
        yield target


def _export(config: RunConfig, checkpoint: Path, target: Path) -> None:
    prepare_torch(config.device, config.threads)
    model_dir = resolve_model(config.model)
    _log.info("loading the model and %s", checkpoint)
    trainer = make_run_trainer(config, model_dir)
    trainer.load(checkpoint)
    trainer.export(target, dtype=export_dtype(model_dir, config.generated_in))
