"""An adapter of `tailrace bench` for TRL's GRPOTrainer on a CPU: DIRECTORY.

    tailrace bench math-32b --adapter "build/bench-trl/venv/bin/python benchmarks/trl_adapter.py"

It runs in TRL's environment and imports nothing of Tailrace. Each response gets its length by its logits: the
end-of-sequence token is impossible before the last one, and certain there. A prompt is one word, repeated.
"""

import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from adapter_jobs import check_plays, grading_s, read_jobs
from datasets import Dataset  # type: ignore[import-untyped]
from transformers import AutoTokenizer, LogitsProcessor, LogitsProcessorList, PreTrainedTokenizerBase, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

MICRO_BATCH = 4
"""The most samples of a forward pass: their logits take gigabytes."""
PLAYS = {"device": "cpu", "devices": 1, "algorithm": "grpo", "kl_coefficient": 0.0}
"""What the header of the jobs has to say."""


class Events:
    """The events of the run, with times since it began."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w")
        self._zero = time.perf_counter()

    def now(self) -> float:
        """Seconds since the run began."""
        return time.perf_counter() - self._zero

    def emit(self, task: str, actor: str, start: float, end: float, step: int, **more: Any) -> None:
        """Write an event."""
        event = {"task": task, "actor": actor, "start": start, "end": end, "step": step, **more}
        self._file.write(json.dumps(event) + "\n")
        self._file.flush()


class ExactLengths(LogitsProcessor):
    """Lets each sequence of a batch end at its length, and notes when it does."""

    def __init__(self, lengths: list[int], end: int, events: Events) -> None:
        """`end`: the end-of-sequence token."""
        self.ended = [0.0] * len(lengths)
        self._lengths = torch.tensor(lengths)
        self._end = end
        self._events = events
        self._made = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """See `LogitsProcessor`."""
        now = self._events.now()
        for place in (self._lengths == self._made).nonzero().flatten().tolist():
            self.ended[place] = now
        scores[:, self._end] = -torch.inf
        last = (self._lengths == self._made + 1).nonzero().flatten()
        scores[last] = -torch.inf
        scores[last, self._end] = 0.0
        self._made += 1
        return scores

    def finish(self) -> None:
        """Note the end of the batch, which its longest sequences had."""
        now = self._events.now()
        self.ended = [end or now for end in self.ended]


class Player(TrainerCallback):
    """Plays the jobs: the lengths of a step's responses when they are generated, their rewards when they are graded."""

    def __init__(self, header: dict[str, Any], groups: list[dict[str, Any]], events: Events, end: int) -> None:
        """`end`: the end-of-sequence token."""
        self._size = header["group_size"]
        self._graders = header["graders"]
        self._steps = [[g for g in groups if g["step"] == step] for step in range(header["steps"])]
        self._events = events
        self._end = end
        self._generated = 0
        """Steps whose responses are generated."""
        self._ready = 0.0
        """When the newest step's rewards were there."""

    def exact(self, generate: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a model's `generate`, which TRL calls once a step with all its prompts, group by group."""

        def generate_exactly(*args: Any, **kwargs: Any) -> Any:
            step, start = self._generated, self._events.now()
            groups = self._steps[step]
            prompts = kwargs["attention_mask"].sum(1).tolist()
            asked = [len(group["prompt_ids"]) for group in groups for _ in group["samples"]]
            if prompts != asked:
                raise RuntimeError(f"step {step} has prompts of {prompts} tokens; {asked} were asked for")
            lengths = [job["turns"][0]["generated_tokens"] for group in groups for job in group["samples"]]
            exact_lengths = ExactLengths(lengths, self._end, self._events)
            made = generate(*args, **kwargs, logits_processor=LogitsProcessorList([exact_lengths]))
            exact_lengths.finish()
            self._emit(step, start, lengths, exact_lengths.ended)
            self._generated += 1
            return made

        return generate_exactly

    def _emit(self, step: int, start: float, lengths: list[int], ended: list[float]) -> None:
        for place, (tokens, end) in enumerate(zip(lengths, ended, strict=True)):
            group = self._steps[step][place // self._size]["group"]
            info = {"group": group, "sample": place % self._size}
            self._events.emit("sample", "engine", start, end, step, tokens=tokens, info=info)
        self._events.emit("rollout", "engine", start, max(ended), step, samples=len(lengths), tokens=sum(lengths))

    def reward(self, prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        """The recorded rewards; without any, 0 and 1 by turns. The grading takes its seconds, by so many graders."""
        step, start = self._generated - 1, self._events.now()
        jobs = [(place, job) for group in self._steps[step] for place, job in enumerate(group["samples"])]
        time.sleep(grading_s([job["reward_s"] for _, job in jobs], self._graders))
        self._ready = self._events.now()
        self._events.emit("reward", "reward", start, self._ready, step, samples=len(jobs))
        return [float(place % 2) if job["reward"] is None else job["reward"] for place, job in jobs]

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Note the time."""
        self._begin = self._events.now()

    def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        """Tell of the update, and of the step."""
        step, now = state.global_step - 1, self._events.now()
        self._events.emit("actor", "trainer", self._ready, now, step)
        self._events.emit("step", "trainer", self._begin, now, step)


def word_of_one_token(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a word whose repetition has a token for each time."""
    for word in (" the", " a", "0 "):
        if len(tokenizer(word * 50, add_special_tokens=False)["input_ids"]) == 50:
            return word
    raise SystemExit("the tokenizer has no simple word of one token, of which prompts could be made")


def main(directory: Path) -> None:
    """Play the jobs in `directory`, and leave their events."""
    header, groups = read_jobs(directory)
    samples = header["groups_per_step"] * header["group_size"]
    check_plays({**PLAYS, "mini_batch_size": samples}, header, groups)
    if header["threads"]:
        torch.set_num_threads(header["threads"])
    tokenizer = AutoTokenizer.from_pretrained(header["model"])
    word = word_of_one_token(tokenizer)
    micro_batch = math.gcd(samples, MICRO_BATCH)
    config = GRPOConfig(
        output_dir=str(directory / "trl"),
        use_cpu=True,
        bf16=header["precision"] == "bf16",
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=samples // micro_batch,
        num_generations=header["group_size"],
        max_completion_length=header["max_new_tokens"],
        max_steps=header["steps"],
        learning_rate=header["lr"],
        gradient_checkpointing=header["gradient_checkpointing"],
        temperature=header["temperature"],
        shuffle_dataset=False,
        seed=header["seed"],
        save_strategy="no",
        report_to=[],
        beta=0.0,
    )
    events = Events(directory / "events.jsonl")
    player = Player(header, groups, events, tokenizer.eos_token_id)
    trainer = GRPOTrainer(
        model=header["model"],
        reward_funcs=player.reward,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": word * len(group["prompt_ids"])} for group in groups]),
        processing_class=tokenizer,
        callbacks=[player],
    )
    trainer.model.generate = player.exact(trainer.model.generate)
    trainer.train()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
