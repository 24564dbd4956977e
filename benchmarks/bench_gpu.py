"""`make bench-gpu`: the native engine on a GPU, with CUDA graphs and without, beside transformers `generate`.

The model has random weights in the shape of Qwen2.5-0.5B, in bf16. All get the same fresh random prompts of 64 tokens,
and by default make 128 new tokens for each, at temperature 1. There are rounds, in which every contestant has its turn.
The first round is warm-up, and the median of the others counts. The last line is JSON.
"""

import json
import random
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from bench_engine import HERE, LOGS, NEW_TOKENS, PROMPT_TOKENS, QWEN, draw, generate, medians, quotients, start
from gate import Contestant
from random_model import QWEN_0_5B, write_model

BATCH_SIZES = (1, 8, 64)


def main(
    rounds: Annotated[int, typer.Option(min=1, help="After one of warm-up.")] = 3,
    new_tokens: Annotated[int, typer.Option(min=1, help="Of each response.")] = NEW_TOKENS,
) -> None:
    """Run the comparison on the first GPU."""
    model_dir = write_model(QWEN_0_5B, LOGS / QWEN)
    with ExitStack() as stack:
        contestants = {
            "graphs": native(stack, model_dir, cuda_graphs=True),
            "native": native(stack, model_dir, cuda_graphs=False),
            "hf": start(stack, "hf-cuda", [sys.executable, HERE / "engine_hf.py", model_dir, "cuda"]),
        }

        def rate(contestant: Contestant, batch: int, number: int) -> float:
            rng = random.Random(f"round {number}, batch {batch}")  # the same prompts for every contestant
            prompts = draw(rng, batch, PROMPT_TOKENS, QWEN_0_5B.vocab_size)
            return batch * new_tokens / generate(contestant, prompts, new_tokens)

        cases = {
            f"{name} {batch}": partial(rate, contestant, batch)
            for batch in BATCH_SIZES
            for name, contestant in contestants.items()
        }
        measured = medians(cases, "tokens/s", rounds, rest_s=0.0)
    rates = {name: {str(batch): measured[f"{name} {batch}"] for batch in BATCH_SIZES} for name in contestants}
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
