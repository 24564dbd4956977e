"""Small but whole training runs for tests."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tailrace.config.load import parse_as
from tailrace.config.run import RunConfig
from tailrace.events import Event, read_events


def write_prompts(path: Path, count: int = 24) -> Path:
    """A JSONL file of short, distinct prompts."""
    path.write_text("".join(json.dumps({"prompt": f"n{k}", "answer": str(k)}) + "\n" for k in range(count)))
    return path


def small_run(output_dir: Path, model: Path, prompts: Path, **changes: Any) -> RunConfig:
    """The configuration of four steps of 2 groups of 4 in fp32.

    `changes` are whole sections, or keys of sections, such as trainer__lr.
    """
    values: dict[str, Any] = {
        "output_dir": str(output_dir),
        "threads": 1,
        "model": {"path": str(model)},
        "prompts": {"source": {"type": "jsonl", "path": str(prompts)}, "held_out": 4},
        "rewards": {
            "grader": {"type": "function", "path": "tests.helpers.graders.digit_fraction"},
            "workers": 1,
            "correct_at": 1.0,
        },
        "algorithm": {"type": "grpo", "group_size": 4},
        "sampling": {"max_new_tokens": 12},
        "engine": {"type": "native", "dtype": "float32", "kv_cache_gib": 0.01},
        "trainer": {"steps": 4, "train_batch_size": 8, "precision": "fp32", "lr": 1e-3, "micro_batch_tokens": 64},
        "checkpoint": {"every": 2, "keep": 5},
        "evaluation": {"every": 2},
        "observe": {"tensorboard": False},
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        if name:
            values.setdefault(section, {})[name] = value
        else:
            values[section] = value
    if values.get("pipeline", {}).get("placement") == "separated":
        del values["threads"]  # their pools set the threads
        values.setdefault("queue", {"type": "service", "units": 1})  # a process takes half a second to start
    return parse_as(RunConfig, values, source="test")


def steps_of(output_dir: Path) -> list[Event]:
    """The `step` events of a run."""
    return [event for event in read_events(output_dir / "events.jsonl") if event.task == "step"]


def learned(event: Event) -> dict[str, float]:
    """The figures of a step that depend neither on the clock nor on how samples shared the engine's steps.

    Sharing changes the rounding of the engine's log-probabilities, but nothing that is learned.
    """
    rounded = ("sampling_entropy", "effective_sample_size", "rollout_", "on_policy_")
    measured = ("time/", "share/", "memory/", "critic/", "remade_groups")  # by the clock
    return {
        name: value
        for name, value in event.metrics.items()
        if not name.startswith((*rounded, *measured)) and not name.endswith("_per_s")
    }


def weights(run: Path) -> dict[str, torch.Tensor]:
    """The weights of the exported model."""
    return load_file(run / "model" / "model.safetensors")


def assert_same_run(one: Path, other: Path) -> None:
    """Assert that the figures of every step and the final weights are equal bit for bit."""
    assert {e.step: learned(e) for e in steps_of(one)} == {e.step: learned(e) for e in steps_of(other)}
    ours, theirs = weights(one), weights(other)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
