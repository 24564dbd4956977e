"""Tailrace's side of `make bench-trl`: MODEL_DIR STEPS. The recipe grpo without evaluation."""

import asyncio
import sys
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

import gate

from tailrace.config.load import load_config
from tailrace.config.run import RunConfig
from tailrace.events import Event, EventFile, EventLog
from tailrace.host.compute import prepare_torch
from tailrace.registers import run_files
from tailrace.registers.events import EventKind
from tailrace.run.colocated import build_pipeline, open_parts
from tailrace.run.inputs import load_inputs
from tailrace.run.queue import open_queue, run_table
from tailrace.run.step_metrics import TaskTimes
from tailrace.trainer.checkpoint import CheckpointStore

RECIPE = Path(__file__).parent.parent / "recipes" / "grpo.yaml"


def take_turns(event: Event) -> None:
    """A sink that reports each step and waits for the next turn."""
    if event.task == EventKind.STEP:
        gate.done(
            seconds=event.end - event.start,
            reward=event.metrics["reward"],
            response_tokens=event.metrics["response_tokens_mean"],
            times={name: value for name, value in event.metrics.items() if name.startswith("time/")},
        )
        gate.wait()


async def run(config: RunConfig, directory: Path) -> None:
    """Train, each step when asked to, until the benchmark is done."""
    prepare_torch(config.device, config.threads)
    inputs = load_inputs(config)
    async with AsyncExitStack() as stack:
        parts = await open_parts(config, inputs, stack)
        queue = await open_queue(config.queue, run_table(config), directory / "queue", stack)
        file = EventFile(directory / run_files.EVENTS)
        stack.callback(file.close)
        log = EventLog(sinks=(TaskTimes(), file, take_turns))
        store = CheckpointStore(directory / run_files.CHECKPOINTS, keep=1)
        pipeline = await build_pipeline(config, inputs, parts, queue.queue, store, log, stack)
        gate.wait()
        await pipeline.run()


def main(model: str, steps: int) -> None:
    """Run one step more than asked for: the benchmark stops this process while it waits for its turn."""
    with tempfile.TemporaryDirectory() as directory:
        overrides = [
            f"output_dir={directory}",
            f"model.path={model}",
            f"trainer.steps={steps + 1}",
            f"checkpoint.every={steps + 1}",
            "prompts.held_out=0",
        ]
        asyncio.run(run(load_config(RECIPE, overrides), Path(directory)))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
