"""transformers' side of `make bench-engine` and `make bench-gpu`: MODEL_DIR DEVICE.

It calls `generate` on the whole batch at once.

It offers no log-probabilities of the sampled tokens, only the scores of the whole vocabulary, so none are asked for.
"""

import sys
import time

import gate
import torch
from transformers import AutoModelForCausalLM, GenerationConfig


def main(model_dir: str, device: str) -> None:
    """Generate what the benchmark asks for, until it has had enough."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16, device_map=device)
    # replaces the model's own configuration, which would end responses and leave out unlikely tokens
    model.generation_config = GenerationConfig(do_sample=True, top_k=0)  # type: ignore[no-untyped-call]
    for task in gate.turns():
        start = time.perf_counter()
        prompts_BP = torch.tensor(task["prompts"], device=device)
        output_BT = model.generate(  # type: ignore[misc]  # transformers' own annotation of self
            prompts_BP, attention_mask=torch.ones_like(prompts_BP), max_new_tokens=task["new_tokens"]
        )
        assert isinstance(output_BT, torch.Tensor)
        output_BT.cpu()  # waits for the device
        seconds = time.perf_counter() - start
        gate.done(seconds=seconds, tokens=output_BT.numel() - prompts_BP.numel())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
