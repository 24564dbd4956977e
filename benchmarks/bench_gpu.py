"""`make bench-gpu`: the native engine on a GPU, with CUDA graphs and without, beside transformers `generate`.

The model has random weights in the shape of Qwen2.5-0.5B, in bf16. All get the same fresh random prompts of 64 tokens,
and by default make 128 new tokens for each, at temperature 1. There are rounds, in which every contestant has its turn.
The first round is warm-up, and the median of the others counts. The last line is JSON.
"""

import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import torch
import typer
from bench_engine import HERE, NEW_TOKENS, quotients, rates_of, start
from gate import Contestant
from random_model import QWEN_0_5B, model_of

BATCH_SIZES = (1, 8, 64)


def main(
    rounds: Annotated[int, typer.Option(min=1, help="After one of warm-up.")] = 3,
    new_tokens: Annotated[int, typer.Option(min=1, help="Of each response.")] = NEW_TOKENS,
) -> None:
    """Run the comparison on the first GPU."""
    model_dir = model_of(QWEN_0_5B)
    with ExitStack() as stack:
        contestants = {
            "graphs": native(stack, model_dir, cuda_graphs=True),
            "native": native(stack, model_dir, cuda_graphs=False),
            "hf": start(stack, "hf-cuda", [sys.executable, HERE / "engine_hf.py", model_dir, "cuda"]),
        }
        vocab = QWEN_0_5B.vocab_size
        rates = rates_of(contestants, BATCH_SIZES, vocab, rounds, new_tokens=new_tokens, rest_s=0.0)
    figures = {
        "gpu": torch.cuda.get_device_name(),
        "graphs_over_native": quotients(rates["graphs"], rates["native"]),
        "graphs_over_hf": quotients(rates["graphs"], rates["hf"]),
        "tokens_per_s": rates,
    }
    print(json.dumps({"bench": "gpu"} | figures))


def native(stack: ExitStack, model_dir: Path, *, cuda_graphs: bool) -> Contestant:
    """Start Tailrace on the first GPU."""
    engine = json.dumps({"cuda_graphs": cuda_graphs})
    name = "native-graphs" if cuda_graphs else "native-cuda"
    return start(stack, name, [sys.executable, HERE / "engine_ours.py", model_dir, "cuda", engine])


if __name__ == "__main__":
    typer.run(main)
