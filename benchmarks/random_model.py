"""Models of known shapes with random weights, for measurements of speed alone."""

from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config

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


def write_model(config: Qwen2Config, directory: Path) -> Path:
    """Write a model to `directory` in bf16, with a tokenizer of numbers for words, unless it is there."""
    if not (directory / "tokenizer.json").exists():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
        model.save_pretrained(directory)
        words = {str(token): token for token in range(config.vocab_size)}
        numbers = Tokenizer(WordLevel(words, unk_token="0"))
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=numbers)  # type: ignore[no-untyped-call]
        tokenizer.save_pretrained(directory)
    return directory
