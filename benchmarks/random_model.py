"""Models of known shapes with random weights, for measurements of speed alone."""

from pathlib import Path
from tempfile import TemporaryDirectory

from transformers import Qwen2Config

from tailrace.models.random import random_model

QWEN_0_5B = Qwen2Config(
    vocab_size=151_936,
    hidden_size=896,
    intermediate_size=4864,
    num_hidden_layers=24,
    num_attention_heads=14,
    num_key_value_heads=2,
    max_position_embeddings=4096,
    tie_word_embeddings=True,
)
"""The shape of Qwen2.5-0.5B: 494M parameters, and heads that two ranks share evenly."""

SMALL = Qwen2Config(
    vocab_size=16_384,
    hidden_size=768,
    intermediate_size=2048,
    num_hidden_layers=16,
    num_attention_heads=12,
    num_key_value_heads=4,
    max_position_embeddings=4096,
    tie_word_embeddings=True,
)
"""A small model of 113M parameters."""


def model_of(config: Qwen2Config) -> Path:
    """Return the directory of a model of this shape, which is made once in Tailrace's cache; see `random_model`."""
    with TemporaryDirectory() as directory:
        config.save_pretrained(directory)
        return random_model(Path(directory))
