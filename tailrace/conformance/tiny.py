"""Tiny random models with a real tokenizer, written as Hugging Face directories."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

FAMILIES = ("llama", "qwen2", "qwen3")
CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SPECIAL = ["<pad>", "<eos>", "<user>", "<assistant>", "<system>"]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer with bytes as tokens, after five special ones: 261 tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    fast: PreTrainedTokenizerFast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>"
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def write_tiny_model(family: str, directory: Path, *, seed: int = 0, head_dim: int = 16, query_heads: int = 4) -> Path:
    """Write a 2-layer fp32 model with 2 KV heads, no trivial bias or norm.

    Embeddings are tied except in qwen2. The heads of qwen3 are half as wide again.
    """
    tokenizer = make_tokenizer()
    shape = {
        "vocab_size": len(tokenizer),
        "hidden_size": query_heads * head_dim,
        "intermediate_size": 6 * head_dim,
        "num_hidden_layers": 2,
        "num_attention_heads": query_heads,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": family != "qwen2",
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    torch.manual_seed(seed)
    model: PreTrainedModel
    match family:
        case "llama":
            model = LlamaForCausalLM(LlamaConfig(**shape))
        case "qwen2":
            model = Qwen2ForCausalLM(Qwen2Config(**shape))
        case "qwen3":
            model = Qwen3ForCausalLM(Qwen3Config(**shape, head_dim=3 * head_dim // 2))
        case _:
            raise ValueError(f"no tiny model of family {family!r}; expected one of {FAMILIES}")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory
