"""An engine that somebody else wrote, by the dotted path of what makes it; docs/adapters.md."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tailrace.config.engine import AdapterEngineConfig
from tailrace.engine.backends.base import Backend
from tailrace.engine.base import Engine, EngineArgs
from tailrace.errors import UserError
from tailrace.host.user_code import check_call, load_callable

KEY = "engine.path"


def load_engine_factory(config: AdapterEngineConfig) -> Callable[..., Any]:
    """What `config` names, if it can be called as `AdapterBackend.make` calls it.

    Raises:
        UserError: it cannot, or is not there.
    """
    factory = load_callable(KEY, config.path)
    check_call(KEY, config.path, factory, "args", **config.options)
    return factory


class AdapterBackend(Backend):
    """Nothing is known of the engine until it is made: the context is the model's, and all sampling is its own."""

    def __init__(self, config: AdapterEngineConfig) -> None:
        self._config = config

    def make(self, args: EngineArgs) -> Engine:
        """`f(args, **options)`.

        Raises:
            UserError: `f` cannot be called, or gives something else than an engine.
        """
        engine = load_engine_factory(self._config)(args, **self._config.options)
        if not isinstance(engine, Engine):
            raise UserError(
                f"{KEY} {self._config.path!r} made a {type(engine).__name__}; "
                "it must make a tailrace.engine.base.Engine"
            )
        return engine

    def check(self, model_dir: Path, *, device: torch.device) -> None:
        """Whether `f` is there and can be called.

        Raises:
            UserError: it cannot, or is not there.
        """
        load_engine_factory(self._config)
