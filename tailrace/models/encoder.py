"""A language model that reads texts: its hidden states are figures of them."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tailrace.errors import ModelError
from tailrace.models.architecture import CONFIG
from tailrace.models.info import describe_model
from tailrace.models.loading import load_model
from tailrace.models.tokenizer import load_tokenizer

_MOST_TOKENS = 1024
"""Of a text; the last ones count."""
_TOKENIZER = ("tokenizer.json", "tokenizer.model", "vocab.json")


def tokenizer_identity(model_dir: Path) -> str:
    """The same for directories with the same tokenizer."""
    return _digest(model_dir, _TOKENIZER, "")


def _digest(model_dir: Path, names: Iterable[str], beside: str) -> str:
    digest = hashlib.blake2b(beside.encode(), digest_size=8)
    for name in names:
        if (path := model_dir / name).is_file():
            digest.update(path.read_bytes())
    return digest.hexdigest()


class Encoder:
    """Means of a layer's hidden states over the tokens of a text. The model is loaded with the first text."""

    def __init__(self, model_dir: Path, *, layer: int | None = None) -> None:
        """`layer`: after which, from 1; by default the middle one.

        Raises:
            ModelError: the model cannot be read, or has fewer layers.
        """
        info = describe_model(model_dir)
        if layer is not None and not 1 <= layer <= info.layers:
            raise ModelError(f"layer {layer} of {model_dir} does not exist; it has 1 … {info.layers}")
        self.size = info.hidden
        """Of the hidden states."""
        self._model_dir = model_dir
        self._layer = layer or (info.layers + 1) // 2
        self._read: Callable[[str], npt.NDArray[np.float32]] | None = None

    @property
    def identity(self) -> str:
        """The same for models with the same configuration and tokenizer, read after the same layer.

        Their weights may differ, as those of a base model and of what was trained from it.
        """
        return _digest(self._model_dir, (CONFIG, *_TOKENIZER), str(self._layer))

    def __call__(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """Return [n, size] hidden states of n texts, one after the other: their lengths differ.

        Raises:
            ModelError: the model cannot be loaded.
        """
        self._read = self._read or _reader(self._model_dir, self._layer)
        return np.stack([self._read(text) for text in texts]) if texts else np.zeros((0, self.size), np.float32)


def _reader(model_dir: Path, layer: int) -> Callable[[str], npt.NDArray[np.float32]]:
    """Load a model, and return the function that reads a text with it."""
    import torch

    model = load_model(model_dir, dtype=torch.float32)
    model.train(False)
    tokenizer = load_tokenizer(model_dir)

    def read(text: str) -> npt.NDArray[np.float32]:
        ids = tokenizer.encode(text, add_special_tokens=False)[-_MOST_TOKENS:]
        if not ids:
            return np.zeros(model.config.hidden_size, np.float32)
        with torch.inference_mode():
            made = model(torch.tensor([ids]), output_hidden_states=True, use_cache=False)
        return np.asarray(made.hidden_states[layer][0].mean(0).numpy(), np.float32)

    return read
