"""Tiny random reward models, written as Hugging Face directories."""

import math
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from tailrace.conformance.tiny import make_tokenizer


def write_reward_model(
    directory: Path,
    *,
    labels: int = 1,
    has_template: bool = True,
    has_pad: bool = True,
    is_classifier: bool = True,
    is_broken: bool = False,
    vocabulary: int | None = None,
) -> Path:
    """Write a 2-layer fp32 classifier that reads 128 tokens. `is_broken`: its scores are NaN.

    `vocabulary`: by default as many tokens as the tokenizer has.
    """
    tokenizer = make_tokenizer()
    if not has_template:
        tokenizer.chat_template = None
    if not has_pad:
        tokenizer.pad_token = None
    config = LlamaConfig(
        vocab_size=vocabulary or len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    config.num_labels = labels
    torch.manual_seed(0)
    kind: Any = LlamaForSequenceClassification if is_classifier else LlamaForCausalLM
    model = kind(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
        if is_broken:
            model.score.weight.fill_(math.nan)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory
