"""A tiny Llama as a GGUF file, with a byte tokenizer of one merge."""

from pathlib import Path

import gguf
import numpy as np
from safetensors.torch import load_file

from tailrace.conformance.tiny import CHAT_TEMPLATE, SPECIAL, make_tokenizer
from tailrace.models.info import ModelInfo, describe_model

_CONTROL, _NORMAL = 3, 1


def write_tiny_gguf(directory: Path, path: Path, *, architecture: str = "llama") -> Path:
    """Write the weights of the Hugging Face directory `directory`, in fp32, as the file `path`."""
    writer = gguf.GGUFWriter(path, architecture)
    _add_sizes(writer, describe_model(directory))
    _add_tokenizer(writer)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    for name, tensor in load_file(directory / "model.safetensors").items():
        gguf_name = names.get_name(name, try_suffixes=(".weight",))
        assert gguf_name is not None
        heads = {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2])
        writer.add_tensor(gguf_name, _interleaved(tensor.numpy(), heads) if heads else tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_sizes(writer: gguf.GGUFWriter, model: ModelInfo) -> None:
    writer.add_block_count(model.layers)
    writer.add_context_length(model.context_length)
    writer.add_embedding_length(model.hidden)
    writer.add_feed_forward_length(model.intermediate)
    writer.add_head_count(model.heads)
    writer.add_head_count_kv(model.kv_heads)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(model.head_dim)
    writer.add_vocab_size(model.vocab)


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    vocabulary = make_tokenizer().get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    tokens[-1] = "he"  # readers require a merge
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_merges(["h e"])
    writer.add_token_types([_CONTROL if token in SPECIAL else _NORMAL for token in tokens])
    writer.add_eos_token_id(SPECIAL.index("<eos>"))
    writer.add_pad_token_id(SPECIAL.index("<pad>"))
    writer.add_chat_template(CHAT_TEMPLATE)


def _interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Interleave the two halves of each rotary head, as GGUF does."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, weight.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))
