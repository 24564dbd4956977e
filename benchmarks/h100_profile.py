"""Writes `h100_steps.json`: the step times of models on H100, from NVIDIA's measured kernel tables.

    python -m venv build/h100 && build/h100/bin/pip install aiconfigurator-core==0.12.0
    build/h100/bin/python benchmarks/h100_profile.py

aiconfigurator-core (Apache-2.0) holds latencies of kernels as measured on H100 SXM under vLLM, and adds up those of a
step. For each model the file has decode steps over batch sizes and contexts, prefills of one prompt, and the tokens
that the KV cache holds beside the weights. It is kept in the repository, since the package has 82 MB.
"""

import json
import tempfile
from pathlib import Path

from aiconfigurator_core.sdk.engine import EngineHandle

OUTPUT = Path(__file__).with_name("h100_steps.json")
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS = (64, 512, 2048, 8192, 32768)
"""Tokens of each sequence."""
PROMPTS = (128, 512, 2048, 8192)
GIB = 2**30
USED = 0.9
"""The part of a GPU's 80 GiB that weights and cache may have."""

QWEN_14B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "torch_dtype": "bfloat16",
}
MODELS = {
    "8b": ("Qwen/Qwen3-8B", 1, 8.2e9, 36, 8),
    "14b": ("Qwen3-14B", 2, 14.8e9, 40, 8),
    "32b": ("Qwen/Qwen3-32B", 4, 32.8e9, 64, 8),
    "235b": ("Qwen/Qwen3-235B-A22B", 8, 235.1e9, 94, 4),
}
"""The model, its TP degree, parameters, layers and KV heads; all heads have 128 elements, in bfloat16."""


def profile(name: str) -> dict[str, object]:
    """The step times of a model."""
    model, tp, parameters, layers, kv_heads = MODELS[name]
    with tempfile.TemporaryDirectory() as directory:
        path = model
        if "/" not in model:
            path = directory
            (Path(directory) / "config.json").write_text(json.dumps(QWEN_14B))
        options = {"moe_tp_size": 1, "moe_ep_size": tp} if "A22B" in model else {}
        handle = EngineHandle.compile(path, "h100_sxm", "vllm", tp_size=tp, **options)
    token_bytes = 2 * 2 * layers * kv_heads * 128
    return {
        "model": model,
        "tp": tp,
        "cache_tokens": int((tp * 80 * GIB * USED - 2 * parameters) / token_bytes),
        "decode": [
            [size, size * context, round(handle.predict_decode_latency(size, context, 2) / 1000, 7)]
            for size in SIZES
            for context in CONTEXTS
        ],
        "prefill": [[tokens, round(handle.predict_prefill_latency(1, tokens) / 1000, 7)] for tokens in PROMPTS],
    }


if __name__ == "__main__":
    OUTPUT.write_text(json.dumps({name: profile(name) for name in MODELS}, indent=1) + "\n")
