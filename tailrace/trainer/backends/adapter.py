"""A trainer from outside the project, by the dotted path of the function that makes it; see docs/adapters.md."""

from collections.abc import Callable
from typing import Any

from tailrace.config.trainer import AdapterTrainerBackend
from tailrace.errors import UserError
from tailrace.host.user_code import check_call, load_callable
from tailrace.trainer.base import Trainer, TrainerArgs

KEY = "trainer.backend.path"


def load_trainer_factory(backend: AdapterTrainerBackend) -> Callable[..., Any]:
    """Load the function that `backend` names, if `open_adapter` can call it.

    Raises:
        UserError: it is missing, or cannot be called so.
    """
    factory = load_callable(KEY, backend.path)
    check_call(KEY, backend.path, factory, "args", **backend.options)
    return factory


def open_adapter(backend: AdapterTrainerBackend, args: TrainerArgs) -> Trainer:
    """Call `f(args, **options)`, where `backend` names `f`.

    Raises:
        UserError: `f` cannot be called, or returns something other than a trainer.
    """
    trainer = load_trainer_factory(backend)(args, **backend.options)
    if not isinstance(trainer, Trainer):
        raise UserError(
            f"{KEY} {backend.path!r} made a {type(trainer).__name__}; it must make a tailrace.trainer.base.Trainer"
        )
    return trainer
