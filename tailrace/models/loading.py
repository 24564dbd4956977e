"""Loads models with transformers, and checks that they are what our own engine makes of the same directory."""

import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from tailrace.errors import ModelError, one_line
from tailrace.models.architecture import CONFIG
from tailrace.models.info import describe_model

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

_LOADING = threading.Lock()
"""transformers loads one model at a time: it changes state of the whole process."""


def check_model(directory: Path) -> None:
    """Check that engine and trainer can read the model in `directory`, before either is made.

    Raises:
        ModelError: see `describe_model` and `check_config`.
    """
    describe_model(directory)
    check_config(directory)


def check_config(directory: Path) -> None:
    """Check that transformers can read the model's configuration.

    Raises:
        ModelError: it cannot.
    """
    from transformers import AutoConfig

    try:
        AutoConfig.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # of many kinds: of its own checks, of attributes that cannot be set, of torch
        raise ModelError(f"transformers cannot read {directory / CONFIG}: {one_line(error)}") from None


def load_model(directory: Path, *, dtype: "torch.dtype", attention: str | None = None) -> "PreTrainedModel":
    """Load the model in `directory`, of any family, on the CPU.

    `attention` names an implementation; without it, the default of transformers is used.

    Raises:
        ModelError: the model cannot be read, or has other weights than its configuration asks for.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # the terminal is the run's display
    options: dict[str, Any] = {"dtype": dtype, "output_loading_info": True, "local_files_only": True}
    if attention is not None:
        options["attn_implementation"] = attention
    try:
        with _LOADING:
            loaded: Any = AutoModelForCausalLM.from_pretrained(directory, **options)
    except (OSError, ValueError, TypeError, LookupError, RuntimeError) as error:
        raise ModelError(f"transformers cannot load {directory}: {one_line(error)}") from None
    model, report = cast("tuple[PreTrainedModel, dict[str, set[str]]]", loaded)
    for kind in ("missing_keys", "unexpected_keys"):  # filled with random numbers, or left out
        if names := report[kind]:
            raise ModelError(f"transformers loads {directory} with {kind.replace('_', ' ')}, such as {min(names)}")
    return model
