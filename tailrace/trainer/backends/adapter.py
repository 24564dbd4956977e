"""A trainer that somebody else wrote, by the dotted path of what makes it; docs/adapters.md."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tailrace.config.trainer import AdapterTrainerBackend, TrainerConfig
from tailrace.errors import UserError
from tailrace.host.user_code import check_call, load_callable
from tailrace.trainer.base import Trainer

KEY = "trainer.backend.path"
_KEYWORDS: dict[str, Any] = dict.fromkeys(("temperature", "total_updates", "device"))


def load_trainer_factory(backend: AdapterTrainerBackend) -> Callable[..., Any]:
    """What `backend` names, if it can be called as `open_adapter` calls it.

    Raises:
        UserError: it cannot, or is not there.
    """
    factory = load_callable(KEY, backend.path)
    check_call(KEY, backend.path, factory, "model_dir", "config", **_KEYWORDS, **backend.options)
    return factory


def open_adapter(
    backend: AdapterTrainerBackend,
    model_dir: Path,
    config: TrainerConfig,
    *,
    temperature: float,
    total_updates: int,
    device: str,
) -> Trainer:
    """`factory(model_dir, config, temperature=…, …, **options)`; the arguments are those of `SingleTrainer`.

    Raises:
        UserError: the factory cannot be called, or gives something else than a trainer.
    """
    trainer = load_trainer_factory(backend)(
        model_dir,
        config,
        temperature=temperature,
        total_updates=total_updates,
        device=device,
        **backend.options,
    )
    if not isinstance(trainer, Trainer):
        raise UserError(
            f"{KEY} {backend.path!r} made a {type(trainer).__name__}; it must make a tailrace.trainer.base.Trainer"
        )
    return trainer
