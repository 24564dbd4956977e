"""Backends answer for an engine before it exists. Each `engine.type` has one `Backend`."""

from abc import ABC, abstractmethod
from pathlib import Path

import torch

from tailrace.config.engine import SamplingConfig
from tailrace.engine.base import Engine, EngineArgs
from tailrace.errors import ConfigError
from tailrace.models.info import describe_model
from tailrace.planning.engine_size import EngineSize


class Backend(ABC):
    """Makes engines of one type, and answers questions about them. It is made from the section `engine` of a recipe.

    Each answer has a default, for an engine of which nothing is known.
    """

    @abstractmethod
    def make(self, args: EngineArgs) -> Engine:
        """Make the engine; see `make_engine` (tailrace/engine/factory.py)."""

    @property
    def capacity(self) -> int | None:
        """The most sequences that the whole engine decodes together; None where it is not known."""
        return None

    @property
    def size(self) -> EngineSize | None:
        """What the engine has; None where it is not known."""
        return None

    def context_length(self, model_dir: Path) -> int:
        """The most tokens of a sequence, prompt and response together.

        Raises:
            ModelError: the model cannot be read.
            ConfigError: the configuration asks for more than the model has.
        """
        return describe_model(model_dir).context_length

    def check(self, model_dir: Path, *, device: torch.device) -> None:  # noqa: B027  (many engines have nothing to say)
        """Check that such an engine can be made for the model on the device. Its memory is checked elsewhere.

        Raises:
            ConfigError: the engine cannot be made.
            UserError: something that the engine needs is not installed or not there.
        """

    def check_sampling(self, sampling: SamplingConfig) -> None:  # noqa: B027  (many engines have nothing to say)
        """Check that the engine can sample as configured.

        Raises:
            ConfigError: it would sample differently.
        """

    def check_cache(self, model_dir: Path, *, longest_prompt: int, max_new_tokens: int) -> None:  # noqa: B027  (many engines have nothing to say)
        """Check that the longest sequence fits the KV cache by itself.

        Raises:
            ConfigError: the sequence does not fit.
            ModelError: the engine cannot hold the model as configured.
        """


def limited_context(max_model_len: int | None, model_dir: Path) -> int:
    """The context of the model, or `engine.max_model_len` where the recipe gives one.

    Raises:
        ModelError: the model cannot be read.
        ConfigError: `max_model_len` exceeds the model's context.
    """
    context = describe_model(model_dir).context_length
    if max_model_len is None:
        return context
    if max_model_len > context:
        raise ConfigError(f"engine.max_model_len {max_model_len} exceeds the model's context of {context}; lower it")
    return max_model_len
