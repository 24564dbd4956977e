"""An engine that somebody else wrote, by the dotted path of what makes it; docs/adapters.md."""

from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

from tailrace.config.engine import AdapterEngineConfig
from tailrace.engine.base import Engine
from tailrace.errors import UserError
from tailrace.host.user_code import check_call, load_callable

KEY = "engine.path"


def load_engine_factory(config: AdapterEngineConfig) -> Callable[..., Any]:
    """What `config` names, if it can be called as `open_adapter` calls it.

    Raises:
        UserError: it cannot, or is not there.
    """
    factory = load_callable(KEY, config.path)
    check_call(KEY, config.path, factory, "model_dir", device=None, executor=None, **config.options)
    return factory


def open_adapter(config: AdapterEngineConfig, model_dir: Path, *, device: str, executor: Executor) -> Engine:
    """`factory(model_dir, device=…, executor=…, **options)`; the arguments are those of `make_engine`.

    Raises:
        UserError: the factory cannot be called, or gives something else than an engine.
    """
    engine = load_engine_factory(config)(model_dir, device=device, executor=executor, **config.options)
    if not isinstance(engine, Engine):
        raise UserError(
            f"{KEY} {config.path!r} made a {type(engine).__name__}; it must make a tailrace.engine.base.Engine"
        )
    return engine
