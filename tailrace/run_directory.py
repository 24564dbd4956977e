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

    def create(self, config: RunConfig) -> None:
        """Make the directory and write the configuration, the newest one where a run is resumed."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.config.write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
        except OSError as error:
            raise UserError(f"output_dir {self.path} cannot be written: {error.strerror}") from None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the directory for this process.

        Raises:
            UserError: another process trains in it.
        """
        with (self.path / ".lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(f"another process is training in {self.path}; wait for it or stop it") from None
            yield


def _get(config: RunConfig, key: str) -> object:
    value: object = config
    for part in key.split("."):
        value = getattr(value, part)
    return value
