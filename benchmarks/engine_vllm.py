"""vLLM's side of `make bench-engine`: MODEL_DIR. It runs in vLLM's environment and imports nothing of Tailrace.

It is asked for no log-probabilities, which the native engine always gives, and for no text, which neither side makes.
"""

import sys
import time

import gate
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt

KV_CACHE_BYTES = 2 << 30


def main(model: str) -> None:
    """Generate what the benchmark asks for, until it has had enough."""
    engine = LLM(
        model,
        dtype="bfloat16",
        max_model_len=2048,
        max_num_seqs=64,
        kv_cache_memory_bytes=KV_CACHE_BYTES,
        skip_tokenizer_init=True,
    )
    for task in gate.turns():
        sampling = SamplingParams(temperature=1.0, max_tokens=task["new_tokens"], ignore_eos=True, detokenize=False)
        prompts = [TokensPrompt(prompt_token_ids=ids) for ids in task["prompts"]]
        start = time.perf_counter()
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - start
        gate.done(seconds=seconds, tokens=sum(len(output.outputs[0].token_ids) for output in outputs))


if __name__ == "__main__":
    main(sys.argv[1])
