"""A trainer from outside the project, by the dotted path of the function that makes it; see docs/adapters.md."""

from collections.abc import Callable
from typing import Any

from tailrace.config.trainer import AdapterTrainerBackend
from tailrace.host.user_code import check_made, load_factory
from tailrace.trainer.base import Trainer, TrainerArgs

KEY = "trainer.backend.path"


def load_trainer_factory(backend: AdapterTrainerBackend) -> Callable[..., Any]:
    """Load the function that `backend` names, if `open_adapter` can call it.

    Raises:
        UserError: it is missing, or cannot be called so.
    """
    return load_factory(KEY, backend.path, "args", **backend.options)


def open_adapter(backend: AdapterTrainerBackend, args: TrainerArgs) -> Trainer:
    """Call `f(args, **options)`, where `backend` names `f`.

    Raises:
        UserError: `f` cannot be called, or returns something other than a trainer.
    """
    made = load_trainer_factory(backend)(args, **backend.options)
    return check_made(KEY, backend.path, made, Trainer)  # type: ignore[type-abstract]
