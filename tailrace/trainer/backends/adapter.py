"""A trainer that somebody else wrote, by the dotted path of what makes it; docs/adapters.md."""

from collections.abc import Callable
from typing import Any

from tailrace.config.trainer import AdapterTrainerBackend
from tailrace.errors import UserError
from tailrace.host.user_code import check_call, load_callable
from tailrace.trainer.base import Trainer, TrainerArgs

KEY = "trainer.backend.path"


def load_trainer_factory(backend: AdapterTrainerBackend) -> Callable[..., Any]:
    """What `backend` names, if it can be called as `open_adapter` calls it.

    Raises:
        UserError: it cannot, or is not there.
    """
    factory = load_callable(KEY, backend.path)
    check_call(KEY, backend.path, factory, "args", **backend.options)
    return factory


def open_adapter(backend: AdapterTrainerBackend, args: TrainerArgs) -> Trainer:
    """`f(args, **options)`.

    Raises:
        UserError: `f` cannot be called, or gives something else than a trainer.
    """
    trainer = load_trainer_factory(backend)(args, **backend.options)
    if not isinstance(trainer, Trainer):
        raise UserError(
            f"{KEY} {backend.path!r} made a {type(trainer).__name__}; it must make a tailrace.trainer.base.Trainer"
        )
    return trainer
