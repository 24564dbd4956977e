"""What the rest of Tailrace asks about an engine before it exists. Each `engine.type` has one `Backend`."""

from abc import ABC, abstractmethod
from pathlib import Path

import torch

from tailrace.config.engine import SamplingConfig
from tailrace.engine.base import Engine, EngineArgs
from tailrace.errors import ConfigError
from tailrace.models.info import describe_model
from tailrace.planning.estimate import EngineSize


class Backend(ABC):
    """Makes engines of one type, and answers for them. It is made from the section `engine` of a recipe.

    Each answer has a default, which holds for an engine of which nothing is known.
    """

    @abstractmethod
    def make(self, args: EngineArgs) -> Engine:
        """The engine. See `make_engine` (tailrace/engine/factory.py)."""

    @property
    def capacity(self) -> int | None:
        """Sequences that the whole engine decodes together at most; None where it does not say."""
        return None

    def size(self, parameters: int) -> EngineSize | None:
        """What an engine of a model with so many parameters takes; None where that is not known."""
        return None

    def context_length(self, model_dir: Path) -> int:
        """Tokens of a sequence at most, prompt and response together.

        Raises:
            ModelError: the model cannot be read.
            ConfigError: the configuration asks for more than the model has.
        """
        return describe_model(model_dir).context_length

    def check(self, model_dir: Path, *, device: torch.device) -> None:  # noqa: B027  (many engines have nothing to say)
        """Whether such an engine can be made for the model on the device. Its memory is checked elsewhere.

        Raises:
            ConfigError: it cannot.
            UserError: what it needs is not installed or not there.
        """

    def check_sampling(self, sampling: SamplingConfig) -> None:  # noqa: B027  (many engines have nothing to say)
        """Whether the engine samples as it is told to.

        Raises:
            ConfigError: it does not.
        """

    def check_cache(self, model_dir: Path, *, longest_prompt: int, max_new_tokens: int) -> None:  # noqa: B027  (many engines have nothing to say)
        """Whether the longest sequence fits the KV cache by itself.

        Raises:
            ConfigError: it does not.
            ModelError: the engine cannot hold the model so.
        """


def limited_context(max_model_len: int | None, model_dir: Path) -> int:
    """The context of the model, or `engine.max_model_len` where the recipe gives one.

    Raises:
        ModelError: the model cannot be read.
        ConfigError: `max_model_len` is more than the model has.
    """
    context = describe_model(model_dir).context_length
    if max_model_len is None:
        return context
    if max_model_len > context:
        raise ConfigError(f"engine.max_model_len {max_model_len} exceeds the model's context of {context}; lower it")
    return max_model_len
