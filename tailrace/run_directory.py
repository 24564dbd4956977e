"""The directory of a run.

config.yaml     the resolved configuration        checkpoints/   what --resume goes on from
events.jsonl    every span of work                model/         the trained model, for transformers
tensorboard/    scalars                           report.html, trace.json
queue/          address and logs of the transfer queue, where it has processes of its own
"""

import fcntl
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import yaml

from tailrace.config.load import parse_config
from tailrace.config.run import RunConfig
from tailrace.errors import CheckpointError, ConfigError, UserError, one_line


class RunDirectory:
    """Paths of a run, and the rules by which it is made and entered again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.events = path / "events.jsonl"
        self.checkpoints = path / "checkpoints"
        self.tensorboard = path / "tensorboard"
        self.model = path / "model"
        self.queue = path / "queue"
        self.report = path / "report.html"
        self.evidence = path / "evidence.json"

    def check_new(self) -> None:
        """Raises UserError where the directory holds a run already."""
        try:
            taken = self.events.exists()
        except OSError as error:
            raise UserError(f"output_dir {self.path} cannot be used: {error.strerror}") from None
        if taken:
            raise UserError(
                f"output_dir {self.path} holds a run already; go on with it (--resume) or choose another output_dir"
            )

    def check_same(self, config: RunConfig) -> None:
        """Raises a UserError where there is no run, or `config` differs from its own where it must not."""
        try:
            before = parse_config(yaml.safe_load(self.config.read_text()), source=str(self.config))
        except FileNotFoundError:
            raise CheckpointError(f"output_dir {self.path} holds no run to resume; leave out --resume") from None
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise CheckpointError(f"{self.config} cannot be read: {one_line(error)}") from None
        was, now = _identity(before), _identity(config)
        for key in was:
            if was[key] != now[key]:
                raise ConfigError(f"{key} cannot change when a run is resumed: it was {was[key]!r} and is {now[key]!r}")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Make the directory and hold it for this process.

        Raises:
            UserError: it cannot be made, or another process trains in it.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = (self.path / ".lock").open("w")
        except OSError as error:
            raise UserError(f"output_dir {self.path} cannot be written: {error.strerror}") from None
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(f"another process is training in {self.path}; wait for it or stop it") from None
            yield

    @contextmanager
    def begun(self, config: RunConfig) -> Iterator[None]:
        """Write the configuration, the newest one of a resumed run; evidence of an earlier failure goes.

        A new run that fails within the block is none: what it has written of itself by then goes, too.
        """
        new = not self.events.exists()
        try:
            self.evidence.unlink(missing_ok=True)
            self.config.write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
        except OSError as error:
            raise UserError(f"{self.config} cannot be written: {error.strerror}") from None
        with ExitStack() as failed:
            if new:
                failed.callback(self.events.unlink, missing_ok=True)
                failed.callback(self.config.unlink, missing_ok=True)
            yield
            failed.pop_all()


def _identity(config: RunConfig) -> dict[str, object]:
    """What a resumed run must have as it was: data position, queue and optimizer mean nothing under other values."""
    return {
        "seed": config.seed,
        "model": config.model,
        "prompts": config.prompts,
        "algorithm.group_size": config.algorithm.group_size,
        "algorithm.kl.coefficient > 0": config.algorithm.kl.coefficient > 0,
        "trainer.train_batch_size": config.trainer.train_batch_size,
        "trainer.mini_batch_size": config.mini_batch_size,
    }
