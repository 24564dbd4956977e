"""TRL's side of `make bench-trl`: MODEL_DIR STEPS PRECISION. Runs in TRL's environment and imports nothing of Tailrace.

The workload is chain_sum (two terms, 1-2 digits, seed 1), 32 completions a step in groups of 8, at most 48 new tokens,
temperature 1, no KL. Weights are fp32, under bf16 autocast if PRECISION is bf16. Activations are kept for the backward
pass, which is not TRL's default. The reward is 1 where the last integer of the response is the answer.
"""

import re
import sys
import tempfile
import time
from typing import Any

import gate
import reasoning_gym  # type: ignore[import-untyped]
from datasets import Dataset  # type: ignore[import-untyped]
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

LEARNING_RATE = 3e-5


def dataset() -> Dataset:
    """Return the prompts as chat messages."""
    problems = reasoning_gym.create_dataset(
        "chain_sum", size=2000, seed=1, min_terms=2, max_terms=2, min_digits=1, max_digits=2
    )
    rows = [{"prompt": [{"role": "user", "content": p["question"]}], "answer": p["answer"]} for p in problems]
    return Dataset.from_list(rows)


def last_integer(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """Return 1 where the last integer of a completion is the answer, otherwise 0."""
    found = [re.findall(r"-?\d+", completion[0]["content"]) for completion in completions]
    return [float(bool(numbers) and numbers[-1] == expected) for numbers, expected in zip(found, answer, strict=True)]


class Gate(TrainerCallback):
    """A callback that makes one step each time that the benchmark asks for one."""

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Wait for the turn."""
        gate.wait()
        self.start = time.perf_counter()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """Report the step; logs come once a step, after the update."""
        if logs and "reward" in logs:
            seconds = time.perf_counter() - self.start
            gate.done(
                seconds=seconds, reward=float(logs["reward"]), response_tokens=float(logs["completions/mean_length"])
            )


def main(model: str, steps: int, precision: str) -> None:
    """Train `steps` steps, each when asked to."""
    with tempfile.TemporaryDirectory() as output:
        config = GRPOConfig(
            output_dir=output,
            use_cpu=True,
            bf16=precision == "bf16",
            per_device_train_batch_size=32,
            num_generations=8,
            max_completion_length=48,
            max_steps=steps,
            learning_rate=LEARNING_RATE,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            beta=0.0,
            gradient_checkpointing=False,
            temperature=1.0,
        )
        GRPOTrainer(
            model=model,
            reward_funcs=last_integer,
            args=config,
            train_dataset=dataset(),
            processing_class=AutoTokenizer.from_pretrained(model),
            callbacks=[Gate()],
        ).train()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
