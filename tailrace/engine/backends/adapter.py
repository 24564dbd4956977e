"""An engine that somebody else wrote, named by the dotted path of its factory; see docs/adapters.md."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tailrace.config.engine import AdapterEngineConfig
from tailrace.engine.backends.base import Backend
from tailrace.engine.base import Engine, EngineArgs
from tailrace.host.user_code import check_made, load_factory

KEY = "engine.path"


def load_engine_factory(config: AdapterEngineConfig) -> Callable[..., Any]:
    """Load the factory that `config` names, and check that it can be called as `AdapterBackend.make` calls it.

    Raises:
        UserError: the factory is not there, or cannot be called so.
    """
    return load_factory(KEY, config.path, "args", **config.options)


class AdapterBackend(Backend):
    """The backend of an adapter. Nothing is known of its engine in advance, so the defaults of `Backend` hold."""

    def __init__(self, config: AdapterEngineConfig) -> None:
        self._config = config

    def make(self, args: EngineArgs) -> Engine:
        """Return `f(args, **options)`, where `f` is the configured factory.

        Raises:
            UserError: `f` cannot be called, or returns something other than an engine.
        """
        made = load_engine_factory(self._config)(args, **self._config.options)
        return check_made(KEY, self._config.path, made, Engine)  # type: ignore[type-abstract]

    def check(self, model_dir: Path, *, device: torch.device) -> None:
        """Check that the factory is there and can be called.

        Raises:
            UserError: it is not there, or cannot be called.
        """
        load_engine_factory(self._config)
