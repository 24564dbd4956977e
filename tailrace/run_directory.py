"""The directory of a run.

config.yaml     the resolved configuration        checkpoints/   what --resume goes on from
events.jsonl    every span of work                model/         the trained model, for transformers
tensorboard/    scalars                           report.html, trace.json
"""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from tailrace.config.load import parse_config
from tailrace.config.run import RunConfig
from tailrace.errors import CheckpointError, ConfigError, UserError

FIXED = ("seed", "model", "prompts", "algorithm.group_size", "trainer.train_batch_size", "trainer.mini_batch_size")
"""Keys that a resumed run must have as they were: the data position and the optimizer mean nothing under others."""


class RunDirectory:
    """Paths of a run, and the rules by which it is made and entered again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.events = path / "events.jsonl"
        self.checkpoints = path / "checkpoints"
        self.tensorboard = path / "tensorboard"
        self.model = path / "model"
        self.evidence = path / "evidence.json"

    def check_new(self) -> None:
        """Raises UserError where the directory holds a run already."""
        if self.events.exists():
            raise UserError(
                f"output_dir {self.path} holds a run already; go on with it (--resume) or choose another output_dir"
            )

    def check_same(self, config: RunConfig) -> None:
        """Raises a UserError where there is no run, or `config` differs from its own where it must not."""
        try:
            text = self.config.read_text()
        except FileNotFoundError:
            raise CheckpointError(f"output_dir {self.path} holds no run to resume; leave out --resume") from None
        before = parse_config(yaml.safe_load(text), source=str(self.config))
        for key in FIXED:
            was, now = _get(before, key), _get(config, key)
            if was != now:
                raise ConfigError(f"{key} cannot change when a run is resumed: it was {was!r} and is {now!r}")

    @contextmanager
    def opened(self, config: RunConfig) -> Iterator[None]:
        """Make the directory, hold it for this process, and write the configuration: the newest one of a resumed run.

        Raises:
            UserError: it cannot be written, or another process trains in it.
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
            self.config.write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
            yield


def _get(config: RunConfig, key: str) -> object:
    value: object = config
    for part in key.split("."):
        value = getattr(value, part)
    return value
